"""Raw runs of known speed and latency, for the tests of the analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.benchmarks.evidence.load import Outcome
from tests.benchmarks.evidence.raw import MeasuredPoint, Run
from tests.benchmarks.evidence.scenario import System, SystemKind

SYSTEMS = {
    one.name: one
    for one in (
        System(name="none", kind=SystemKind.STOCK),
        System(name="lookup-k3", kind=SystemKind.STATIC, drafter="lookup", draft_tokens=3),
        System(name="eagle-k1", kind=SystemKind.STATIC, drafter="eagle", draft_tokens=1),
        System(name="eagle-k3", kind=SystemKind.STATIC, drafter="eagle", draft_tokens=3),
        System(name="eagle-table", kind=SystemKind.TABLE, drafter="eagle", acceptance=0.4),
        System(name="ours", kind=SystemKind.OURS, pool=("lookup", "eagle"), reference=True),
        System(name="ours-eagle", kind=SystemKind.OURS, pool=("eagle",)),
    )
}


def outcome(latency_s: float = 1.0, *, phase: str = "p", slo_class: str = "", tpot_s: float = 0.01) -> Outcome:
    return Outcome(phase, slo_class, latency_s, ttft_s=latency_s - 10 * tpot_s, tokens=11)


def run(
    system: str, repeat: int, points: Mapping[str, Sequence[Outcome]], seconds: float = 1.0, sitting: int = 0
) -> Run:
    measured = tuple(
        MeasuredPoint(name, seconds, tuple(one), None, 0.0, 1.0, None, None) for name, one in points.items()
    )
    return Run("key", 1, repeat, sitting, system, measured, 1000.0, 0.5, "2026-11-21T00:00:00+00:00")


def speed_runs(tokens_per_s: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Run]:
    """From point -> system -> tokens a second in repeats 1, 2, ..."""
    runs = []
    for point, of_system in tokens_per_s.items():
        for system, speeds in of_system.items():
            for repeat, speed in enumerate(speeds, start=1):
                runs.append(run(system, repeat, {point: [outcome()]}, seconds=11 / speed))
    return runs
