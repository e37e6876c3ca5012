"""`outrider-simulate`: what a pool would do on hardware that is not at hand, under a load that has not come yet."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider_crds.base import seconds

from outrider_runtime.simulate import dry_run, dry_run_report, profiles
from outrider_runtime.simulate.assumptions import read_acceptance, read_mix
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.held_out import judge, print_judgements
from outrider_runtime.simulate.load import Load, Wanted, read_load
from outrider_runtime.simulate.pod import Pod, read_pod
from outrider_runtime.simulate.policies import OURS, PolicyChoice, compared
from outrider_runtime.simulate.replay.workload import Lengths as Typical
from outrider_runtime.simulate.report import print_setting, print_table, write_report
from outrider_runtime.simulate.run import Run, Scenario, simulate
from outrider_runtime.simulate.workload import Lengths

EXAMPLES = """\
examples:
  outrider-simulate --manifest examples/llama-h200.yaml --system h200_sxm --output out
  outrider-simulate --manifest examples/llama-h200.yaml --profile llama-3.1-8b-h100 --rate 8 --compare
  outrider-simulate --manifest service.yaml --profile report.json --trace azure.csv --rate 2 --output out
  outrider-simulate --check-profiles
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit code 2 for input that cannot be simulated, with a sentence on stderr that says why."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.check_profiles:
        print_judgements(judge(), sys.stdout)
        return
    if options.manifest is None or (options.profile is None) == (options.system is None):
        parser.error("--manifest and one of --system and --profile are needed")
    try:
        _dry_run(options) if options.system else _simulate(options)
    except SimulationError as error:
        print(f"outrider-simulate: {error}", file=sys.stderr)
        sys.exit(2)


def _dry_run(options: argparse.Namespace) -> None:
    lengths = Typical(options.prompt_tokens, options.output_tokens)
    plan = dry_run.plan(options.manifest, options.system, options.lifted_to, lengths)
    dry_run_report.print_setting(plan, sys.stdout)
    rows = list(dry_run.rows(plan, [options.rate] if options.rate else dry_run.rates(plan)))
    dry_run_report.print_rows(plan, rows, sys.stdout)
    if options.output is not None:
        try:
            written = dry_run_report.write(options.output, plan, rows)
        except OSError as error:
            raise SimulationError(f"--output {options.output}: {error}") from error
        print(f"\nwritten: {', '.join(map(str, written))}")


def _simulate(options: argparse.Namespace) -> None:
    pod = read_pod(options.manifest, profiles.load(options.profile))
    acceptance = read_acceptance(pod, options.acceptance, options.hit_rate)
    load = read_load(_wanted(options, pod))
    scenario = Scenario(pod, acceptance.rules, acceptance.hit_rates, load.source, load.duration_s, options.seed)
    print_setting(pod, load.words, acceptance, sys.stdout)
    runs = [_run(scenario, choice) for choice in (compared(pod) if options.compare else [OURS])]
    print_table(runs, pod.profile.label, sys.stdout)
    if options.output is not None:
        setting = {"load": load.words, "acceptance": list(acceptance.lines()), "seed": options.seed}
        _write(options.output, pod, setting, runs, load)


def _wanted(options: argparse.Namespace, pod: Pod) -> Wanted:
    return Wanted(
        trace=options.trace,
        rate_per_s=options.rate,
        concurrency=options.concurrency,
        duration_s=options.duration,
        lengths=Lengths(options.prompt_tokens, options.output_tokens),
        classes=read_mix(pod, options.mix),
        seed=options.seed,
    )


def _run(scenario: Scenario, choice: PolicyChoice) -> Run:
    print(f"simulating {choice.name} ...", file=sys.stderr, flush=True)
    return simulate(scenario, choice)


def _write(folder: Path, pod: Pod, setting: dict[str, object], runs: Sequence[Run], load: Load) -> None:
    try:
        written = write_report(folder, pod, setting, runs, load.duration_s)
    except OSError as error:
        raise SimulationError(f"--output {folder}: {error}") from error
    print(f"\nwritten: {', '.join(map(str, written))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider-simulate",
        description="Run Outrider's controller against a simulated engine: any pool, on any profile, under any load.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ", ".join(path.stem for path in sorted(profiles.FOLDER.glob("*.yaml")))
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="the SpeculativeService to simulate")
    parser.add_argument(
        "--profile", metavar="NAME|FILE", help=f"step times: a result of outrider-profile, or one of {known}"
    )
    parser.add_argument(
        "--system",
        metavar="GPU",
        help="compose step times of this system instead: h200_sxm, h100_sxm, a100_sxm, l40s, ...",
    )
    parser.add_argument(
        "--lifted-to",
        type=_share,
        default=0.7,
        metavar="A",
        help="with --system: share of first proposals accepted (0.7)",
    )
    _add_load(parser)
    _add_truth(parser)
    parser.add_argument(
        "--compare", action="store_true", help="also without speculation, and with k = 1, 3, 5 of each drafter"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write simulation.json and simulation.png here")
    parser.add_argument(
        "--check-profiles",
        action="store_true",
        help="print how far the shipped profiles are from held-out measurements",
    )
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load of one pod")
    load.add_argument(
        "--rate", type=_positive, metavar="R", help="requests a second: Poisson, or the trace scaled to it"
    )
    load.add_argument("--trace", type=Path, metavar="FILE", help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens")
    load.add_argument("--concurrency", type=_count, metavar="N", help="keep N requests in the engine instead")
    load.add_argument(
        "--duration", type=_duration, metavar="D", help="requests come for so long (default 1m, or the whole trace)"
    )
    load.add_argument(
        "--prompt-tokens", type=_count, default=512, metavar="N", help="mean without a trace (default 512)"
    )
    load.add_argument(
        "--output-tokens", type=_count, default=128, metavar="N", help="mean without a trace (default 128)"
    )
    load.add_argument("--mix", metavar="CLASS=WEIGHT,...", help="SLO classes of requests (default: the default class)")
    load.add_argument("--seed", type=_seed, default=0, metavar="N", help="of all that is drawn (default 0)")


def _add_truth(parser: argparse.ArgumentParser) -> None:
    truth = parser.add_argument_group("what the target accepts")
    truth.add_argument(
        "--acceptance", action="append", default=[], metavar="DRAFTER[/CLASS][@TIME]=A[,A...]",
        help="probability that a proposal is accepted, by position; of one class, or from a time on; may be repeated",
    )  # fmt: skip
    truth.add_argument(
        "--hit-rate", action="append", default=[], metavar="DRAFTER=SHARE",
        help="how often a lookup has proposals at all; may be repeated",
    )  # fmt: skip


def _positive(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def _seed(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


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
