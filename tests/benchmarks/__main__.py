"""`make bench`: the evidence (scenarios/*.yaml against testbed.yaml), and the benchmarks that stand alone.

python -m tests.benchmarks                 everything but the operator's, under 90 minutes; cut off, it goes on
python -m tests.benchmarks --only 3        one scenario, or one benchmark by its name
python -m tests.benchmarks --full          the whole grid, and the operator's (hours)
python -m tests.benchmarks --quick         a few requests of each, to see that it runs; results/ stays as it is
python -m tests.benchmarks --judge         measure nothing: bars and plots from what is there
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.analysis import cost, plots, report, throughput
from tests.benchmarks.analysis.attainment import attained
from tests.benchmarks.analysis.bar import Bar
from tests.benchmarks.analysis.judge import judge, tpot_limits
from tests.benchmarks.evidence.campaign import Campaign
from tests.benchmarks.evidence.prompts import DataError, load_data
from tests.benchmarks.evidence.raw import FOLDER, Run
from tests.benchmarks.evidence.scenario import (
    Acceptance,
    Closed,
    ComparedScenario,
    Cost,
    FileError,
    Scenario,
    Size,
    SLOMix,
    Testbed,
    check_names,
    load_scenarios,
    load_testbed,
)

HERE = Path(__file__).parent
OF_THE_OPERATOR = ("operator_services",)
"""Eight minutes that say nothing of speculation: by name, or with the whole grid."""
SHOWN = 6
TERMINATED = 143  # 128 + SIGTERM, as a shell reports it


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # through every `finally`: no server stays behind
    options = _parser().parse_args()
    size = Size.QUICK if options.quick else Size.FULL if options.full else Size.DEFAULT
    try:
        testbed, scenarios, data = load_testbed(), load_scenarios(size), load_data()
        check_names(scenarios, testbed)
        chosen, alone = choice(options.only, scenarios, size)
    except (FileError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for note in data.notes:
        print(f"note: {note}")
    compared = tuple(one for one in chosen if not isinstance(one, Cost))
    campaign = Campaign(testbed, compared, data, size)
    if not options.judge:
        campaign.run()
    results = FOLDER / "quick" if size is Size.QUICK else report.RESULTS
    bars = _judge_compared(campaign, testbed, results)
    failed = [] if options.judge or size is Size.QUICK else [name for name in alone if not _run_alone(name, campaign)]
    bars += [bar for one in chosen if isinstance(one, Cost) for bar in _judge_cost(one)]
    report.write_summary(bars, {**report.machine(), "size": size.value, "notes": data.notes}, results)
    print(report.table(bars))
    print(f"results in {results}")
    missing = [*campaign.missing(), *failed]
    if missing:
        print(f"not measured ({len(missing)}): {'; '.join(missing[:SHOWN])}{' ...' if len(missing) > SHOWN else ''}")
    return 1 if missing else 0


def choice(only: Sequence[str], scenarios: Sequence[Scenario], size: Size) -> tuple[list[Scenario], list[str]]:
    """Scenarios and stand-alone benchmarks to run. Raises FileError for a name that there is not."""
    alone = [file.stem for file in sorted(HERE.glob("[!_]*.py"))]
    numbers = {str(one.scenario): one for one in scenarios}
    unknown = [name for name in only if name not in (*numbers, *alone)]
    if unknown:
        raise FileError(f"--only {unknown[0]}: there are {', '.join((*numbers, *alone))}")
    if not only:
        return list(scenarios), [name for name in alone if size is Size.FULL or name not in OF_THE_OPERATOR]
    picked = [one for number, one in numbers.items() if number in only]
    theirs = {name for one in picked if isinstance(one, Cost) for name in one.benchmarks}
    return picked, [name for name in alone if name in only or name in theirs]


def _run_alone(name: str, campaign: Campaign) -> bool:
    """In a process of its own: one engine's memory and threads must not weigh on the next."""
    print(f"== {name}", flush=True)
    mark = FOLDER / campaign.version / f"{name}.done"
    if mark.is_file() and (report.RESULTS / f"{name}.json").is_file():
        print("done before, with the same code")
        return True
    if subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=False).returncode != 0:
        return False
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return True


def _judge_compared(campaign: Campaign, testbed: Testbed, results: Path) -> list[Bar]:
    runs, bars, gains = campaign.finished(), list[Bar](), list[throughput.Compared]()
    systems = {system.name: system for system in testbed.systems}
    for scenario in campaign.scenarios:
        mine = [run for run in runs if run.scenario == scenario.scenario]
        if not mine:
            continue
        judged = judge(scenario, mine, systems, campaign.calibration)
        bars += judged.bars
        report.write_document(_stem(scenario), judged.document, results)
        steady = [run.at_usual_speed() for run in mine]
        _plot(scenario, steady, campaign, results / f"{_stem(scenario)}.png")
        if isinstance(scenario, Closed | Acceptance):
            gains += throughput.compare(steady, systems)
    # The bar is over both scenarios together, and the second one has one drafter only.
    return [*bars, throughput.drafters_bar(gains)] if any(bar.scenario == 1 for bar in bars) else bars


def _plot(scenario: ComparedScenario, runs: Sequence[Run], campaign: Campaign, file: Path) -> None:
    systems = {system.name: system for system in campaign.testbed.systems}
    if isinstance(scenario, Closed | Acceptance):
        plots.plot_throughput(runs, systems, scenario.title, file)
    elif isinstance(scenario, SLOMix):
        found = attained(runs, tpot_limits(scenario, campaign.calibration))
        plots.plot_attainment(found, systems, scenario.title, file)
    else:
        plots.plot_latency(runs, systems, scenario.title, file)


def _judge_cost(scenario: Cost) -> list[Bar]:
    skipped, decision = (report.read_result(name) for name in ("skip_draft_at_k0", "controller_decision"))
    return cost.bars(scenario.scenario, skipped, decision)


def _stem(scenario: ComparedScenario) -> str:
    return f"{scenario.scenario}-{scenario.title.lower().replace(' ', '-')}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="scenarios by number, benchmarks by name")
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument("--quick", action="store_true", help="a few requests of each scenario")
    how_much.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--judge", action="store_true", help="measure nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
