"""`outrider-simulate`: what a pool would do on hardware that is not at hand, under a load that has not come yet."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from outrider_crds.base import seconds

from outrider_runtime.simulate import bounds, report, service_manifest
from outrider_runtime.simulate import load as loads
from outrider_runtime.simulate.comparison import PolicyFigures, compared, policies
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.load import Wanted
from outrider_runtime.simulate.replay.workload import Lengths, Workload
from outrider_runtime.simulate.service_manifest import LOOKUP, Service
from outrider_runtime.simulate.simulated_deployment import (
    DEFAULT_ACCEPTANCE,
    Deployment,
    as_profiled,
    deployed,
    on_system,
)
from outrider_runtime.simulate.worlds.world import known

EXAMPLES = """\
examples:
  outrider-simulate --manifest examples/llama-h200.yaml --system h200_sxm --output out
  outrider-simulate --manifest examples/llama-h200.yaml --system h100_sxm --rate 8 --compare
  outrider-simulate --manifest service.yaml --profile report.json --trace azure.csv --rate 2
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit code 2 for input that cannot be simulated, with a sentence on stderr that says why."""
    options = parser().parse_args(arguments)
    try:
        _simulate(options)
    except SimulationError as error:
        print(f"outrider-simulate: {error}", file=sys.stderr)
        sys.exit(2)


def _simulate(options: argparse.Namespace) -> None:
    asked = service_manifest.read(options.manifest)
    world = on_system(asked, options.system) if options.system is not None else as_profiled(options.profile)
    deployment = deployed(asked, world, _acceptance(options, asked))
    lengths = Lengths(options.prompt_tokens, options.output_tokens)
    wanted = Wanted(lengths, options.duration, dict(options.mix), options.seed)
    words = _words(options)
    report.print_setting(deployment, words, sys.stdout)
    if options.output is not None:
        _prepare(options.output)
    found = _figures(deployment, wanted, options)
    report.print_table(deployment, found, sys.stdout)
    if options.output is not None:
        _write(options.output, deployment, words, found)


def _acceptance(options: argparse.Namespace, asked: Service) -> dict[str, float | None]:
    """A share without a name is that of every drafter with a model."""
    models = [member.drafter.name for member in asked.pool if member.recorded_as != LOOKUP]
    found: dict[str, float | None] = {}
    for name, share in options.acceptance:
        found |= dict.fromkeys([name] if name else models, share)
    return found


def _words(options: argparse.Namespace) -> str:
    if options.trace is not None:
        return f"{options.trace.name}" + (
            f", its gaps scaled to {options.rate:g} requests a second" if options.rate else ""
        )
    lengths = f"about {options.prompt_tokens} prompt and {options.output_tokens} output tokens each"
    return f"Poisson arrivals for {options.duration:g} s, {loads.LEAST_REQUESTS} requests at least, {lengths}"


def _figures(deployment: Deployment, wanted: Wanted, options: argparse.Namespace) -> list[PolicyFigures]:
    run = policies(deployment, wanted.seed, statics=options.compare)
    found: list[PolicyFigures] = []
    for rate, load in _loads(deployment, wanted, options):
        print(f"simulating {len(load)} requests at {rate:.3g} a second ...", file=sys.stderr, flush=True)
        found += compared(deployment, load, rate, run)
    return found


def _loads(deployment: Deployment, wanted: Wanted, options: argparse.Namespace) -> Iterator[tuple[float, Workload]]:
    """With the requests a second of each."""
    if options.trace is not None:
        load = loads.traced(deployment, wanted, options.trace, options.rate)
        yield options.rate or len(load) / float(load.at_s[-1]), load
        return
    for rate in [options.rate] if options.rate else loads.rates(deployment, wanted):
        yield rate, loads.at_rate(deployment, wanted, rate)


def _prepare(folder: Path) -> None:
    """Nobody waits for figures that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SimulationError(f"--output {folder}: no folder to write to: {error}") from error


def _write(folder: Path, deployment: Deployment, words: str, found: Sequence[PolicyFigures]) -> None:
    try:
        written = report.write(folder, deployment, words, found)
    except OSError as error:
        raise SimulationError(f"--output {folder}: {error}") from error
    print(f"\nwritten: {', '.join(map(str, written))}")


def parser() -> argparse.ArgumentParser:
    """The program's options."""
    parser = argparse.ArgumentParser(
        prog="outrider-simulate",
        description="Run Outrider's controller in a simulated engine: any pool, on any hardware, under any load.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--manifest", type=Path, required=True, metavar="FILE", help="the SpeculativeService to simulate"
    )
    hardware = parser.add_mutually_exclusive_group(required=True)
    hardware.add_argument(
        "--system", metavar="GPU", help="compose step times of this GPU: h200_sxm, h100_sxm, a100_sxm, l40s, ..."
    )
    hardware.add_argument(
        "--profile",
        metavar="NAME|FILE",
        help=f"step times from a result of outrider-profile, or of {', '.join(known())}",
    )
    parser.add_argument(
        "--acceptance", type=_acceptance_of, action="append", default=[], metavar="[DRAFTER=]A",
        help=f"share of first proposals accepted, or `recorded`; may be repeated (default {DEFAULT_ACCEPTANCE:g})",
    )  # fmt: skip
    parser.add_argument("--compare", action="store_true", help="also each drafter at k = 1, 3, 5")
    parser.add_argument("--output", type=_folder, metavar="DIR", help="write simulation.json and simulation.png here")
    parser.add_argument(
        "--seed", type=_whole(0, bounds.MOST_SEED), default=0, metavar="N", help="of all that is drawn (default 0)"
    )
    _add_load(parser)
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load of one pod")
    load.add_argument(
        "--rate", type=_rate, metavar="R", help="requests a second (default: seven, up to what the GPU can do)"
    )
    load.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens; --rate scales its gaps",
    )
    load.add_argument(
        "--duration", type=_duration, default=20.0, metavar="D", help="requests come for so long (default 20s)"
    )
    load.add_argument(
        "--prompt-tokens",
        type=_whole(1, bounds.MOST_TOKENS),
        default=500,
        metavar="N",
        help="median without a trace (default 500)",
    )
    load.add_argument(
        "--output-tokens",
        type=_whole(1, bounds.MOST_TOKENS),
        default=128,
        metavar="N",
        help="median without a trace (default 128)",
    )
    load.add_argument(
        "--mix", type=_mix, default=[], metavar="CLASS=WEIGHT,...", help="SLO classes of requests (default: all alike)"
    )


def _rate(text: str) -> float:
    try:
        return bounds.rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _folder(text: str) -> Path:
    if not text:  # an unset variable of a script; Path makes the current folder of it
        raise argparse.ArgumentTypeError("it is empty: name a folder")
    return Path(text)


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        try:
            return bounds.whole(text, least, most)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return whole


def _acceptance_of(text: str) -> tuple[str, float | None]:
    name, _, share = text.rpartition("=")
    if share == "recorded":
        return name, None
    try:
        found = float(share)
    except ValueError:
        found = math.nan
    if not 0 < found < 1:
        raise argparse.ArgumentTypeError(f"{share!r} is neither a share between 0 and 1 nor `recorded`")
    return name, found


def _mix(text: str) -> list[tuple[str, float]]:
    found = []
    for part in text.split(","):
        name, _, weight = part.partition("=")
        try:
            found.append((name, float(weight)))
        except ValueError:
            found.append((name, math.nan))
        if not 0 <= found[-1][1] <= bounds.MOST_WEIGHT:
            raise argparse.ArgumentTypeError(f"{part!r}: write CLASS=WEIGHT, a weight of 0 to {bounds.MOST_WEIGHT:g}")
        if name in dict(found[:-1]):
            raise argparse.ArgumentTypeError(f"class {name!r} has two weights")
    return found


def _duration(text: str) -> float:
    try:
        duration_s = seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if duration_s <= 0:
        raise argparse.ArgumentTypeError(f"{text} is no time at all")
    return duration_s


if __name__ == "__main__":
    main()
