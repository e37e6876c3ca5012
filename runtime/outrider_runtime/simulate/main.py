"""`outrider-simulate`: estimates the gain of a pool of drafters on any hardware, under any load."""

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
from outrider_runtime.simulate.comparison import PolicyFigures, compare_policies, policies
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.load import LoadOptions
from outrider_runtime.simulate.replay.workload import Lengths, Workload
from outrider_runtime.simulate.service_manifest import LOOKUP, Service
from outrider_runtime.simulate.simulated_deployment import (
    DEFAULT_ACCEPTANCE,
    Deployment,
    deploy,
    find_world,
    load_profiled_world,
)
from outrider_runtime.simulate.worlds.world import world_names

EXAMPLES = """\
examples:
  outrider-simulate --manifest examples/llama-h200.yaml --system h200_sxm --output out
  outrider-simulate --manifest examples/llama-h200.yaml --system h100_sxm --rate 8 --compare
  outrider-simulate --manifest service.yaml --profile report.json --trace azure.csv --rate 2
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the simulation. Exits with code 2, and a sentence on stderr, for input that cannot be simulated."""
    options = parser().parse_args(arguments)
    try:
        _simulate(options)
    except SimulationError as error:
        print(f"outrider-simulate: {error}", file=sys.stderr)
        sys.exit(2)


def _simulate(options: argparse.Namespace) -> None:
    service = service_manifest.read(options.manifest)
    world = find_world(service, options.system) if options.system is not None else load_profiled_world(options.profile)
    deployment = deploy(service, world, _acceptance(options, service))
    lengths = Lengths(options.prompt_tokens, options.output_tokens)
    load_options = LoadOptions(lengths, options.duration, dict(options.mix), options.seed)
    words = _words(options)
    report.print_setting(deployment, words, sys.stdout)
    if options.output is not None:
        _prepare(options.output)
    figures = _figures(deployment, load_options, options)
    report.print_table(deployment, figures, sys.stdout)
    if options.output is not None:
        _write(options.output, deployment, words, figures)


def _acceptance(options: argparse.Namespace, service: Service) -> dict[str, float | None]:
    """Return the acceptance rates by drafter; one without a name holds for every drafter with a model."""
    models = [member.drafter.name for member in service.pool if member.recorded_as != LOOKUP]
    shares: dict[str, float | None] = {}
    for name, share in options.acceptance:
        shares |= dict.fromkeys([name] if name else models, share)
    return shares


def _words(options: argparse.Namespace) -> str:
    if options.trace is not None:
        return f"{options.trace.name}" + (
            f", its gaps scaled to {options.rate:g} requests a second" if options.rate else ""
        )
    lengths = f"about {options.prompt_tokens} prompt and {options.output_tokens} output tokens each"
    return f"Poisson arrivals for {options.duration:g} s, {loads.LEAST_REQUESTS} requests at least, {lengths}"


def _figures(deployment: Deployment, load_options: LoadOptions, options: argparse.Namespace) -> list[PolicyFigures]:
    run = policies(deployment, load_options.seed, statics=options.compare)
    figures: list[PolicyFigures] = []
    for rate, load in _loads(deployment, load_options, options):
        print(f"simulating {len(load)} requests at {rate:.3g} a second ...", file=sys.stderr, flush=True)
        figures += compare_policies(deployment, load, rate, run)
    return figures


def _loads(
    deployment: Deployment, load_options: LoadOptions, options: argparse.Namespace
) -> Iterator[tuple[float, Workload]]:
    """Yield each load with its rate in requests/s."""
    if options.trace is not None:
        load = loads.read_trace_load(deployment, load_options, options.trace, options.rate)
        yield options.rate or len(load) / float(load.at_s[-1]), load
        return
    for rate in [options.rate] if options.rate else loads.rates(deployment, load_options):
        yield rate, loads.draw_poisson_load(deployment, load_options, rate)


def _prepare(folder: Path) -> None:
    """Check that the folder can be written to, before the simulation starts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SimulationError(f"--output {folder}: no folder to write to: {error}") from error


def _write(folder: Path, deployment: Deployment, words: str, figures: Sequence[PolicyFigures]) -> None:
    try:
        written = report.write(folder, deployment, words, figures)
    except OSError as error:
        raise SimulationError(f"--output {folder}: {error}") from error
    print(f"\nwritten: {', '.join(map(str, written))}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
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
        help=f"step times from a result of outrider-profile, or of {', '.join(world_names())}",
    )
    parser.add_argument(
        "--acceptance", type=_parse_acceptance, action="append", default=[], metavar="[DRAFTER=]A",
        help=f"acceptance rate of first proposals, or `recorded`; may be repeated (default {DEFAULT_ACCEPTANCE:g})",
    )  # fmt: skip
    parser.add_argument("--compare", action="store_true", help="also each drafter at k = 1, 3, 5")
    parser.add_argument("--output", type=_folder, metavar="DIR", help="write simulation.json and simulation.png here")
    parser.add_argument(
        "--seed",
        type=_whole(0, bounds.MOST_SEED),
        default=0,
        metavar="N",
        help="seed of the random numbers (default 0)",
    )
    _add_load(parser)
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load of one pod")
    load.add_argument(
        "--rate", type=_rate, metavar="R", help="requests/s (default: seven rates, up to the capacity of the GPU)"
    )
    load.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens; --rate scales its gaps",
    )
    load.add_argument(
        "--duration", type=_duration, default=20.0, metavar="D", help="time over which requests arrive (default 20s)"
    )
    load.add_argument(
        "--prompt-tokens",
        type=_whole(1, bounds.MOST_TOKENS),
        default=500,
        metavar="N",
        help="median prompt length without a trace (default 500)",
    )
    load.add_argument(
        "--output-tokens",
        type=_whole(1, bounds.MOST_TOKENS),
        default=128,
        metavar="N",
        help="median output length without a trace (default 128)",
    )
    load.add_argument(
        "--mix", type=_mix, default=[], metavar="CLASS=WEIGHT,...", help="shares of the SLO classes (default: equal)"
    )


def _rate(text: str) -> float:
    try:
        return bounds.rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _folder(text: str) -> Path:
    if not text:  # an unset variable of a script, which Path would turn into the current folder
        raise argparse.ArgumentTypeError("it is empty: name a folder")
    return Path(text)


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        try:
            return bounds.whole(text, least, most)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return whole


def _parse_acceptance(text: str) -> tuple[str, float | None]:
    name, _, share = text.rpartition("=")
    if share == "recorded":
        return name, None
    try:
        rate = float(share)
    except ValueError:
        rate = math.nan
    if not 0 < rate < 1:
        raise argparse.ArgumentTypeError(f"{share!r} is neither a share between 0 and 1 nor `recorded`")
    return name, rate


def _mix(text: str) -> list[tuple[str, float]]:
    weights: list[tuple[str, float]] = []
    for part in text.split(","):
        name, _, weight = part.partition("=")
        try:
            weights.append((name, float(weight)))
        except ValueError:
            weights.append((name, math.nan))
        if not 0 <= weights[-1][1] <= bounds.MOST_WEIGHT:
            raise argparse.ArgumentTypeError(f"{part!r}: write CLASS=WEIGHT, a weight of 0 to {bounds.MOST_WEIGHT:g}")
        if name in dict(weights[:-1]):
            raise argparse.ArgumentTypeError(f"class {name!r} has two weights")
    return weights


def _duration(text: str) -> float:
    try:
        duration_s = seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if duration_s <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a duration above 0")
    return duration_s


if __name__ == "__main__":
    main()
