"""From a scenario's runs to its bars and to the document of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from tests.benchmarks.analysis import attainment, latency, throughput
from tests.benchmarks.analysis.bar import Bar
from tests.benchmarks.analysis.controller import controller_of
from tests.benchmarks.evidence.plan import Calibration
from tests.benchmarks.evidence.raw import Run
from tests.benchmarks.evidence.scenario import (
    Acceptance,
    Closed,
    ComparedScenario,
    SLOMix,
    System,
)


@dataclass(frozen=True)
class Judged:
    """One scenario: what goes into summary.json, and what goes into its own file."""

    bars: list[Bar]
    document: dict[str, Any]


def judge(
    scenario: ComparedScenario, runs: Sequence[Run], systems: Mapping[str, System], stock: Calibration | None
) -> Judged:
    """Times are brought to the usual speed of the machine; `runs` in the document are as they were measured."""
    number = scenario.scenario
    document = {"scenario": number, "title": scenario.title, "memory_mb": memory(runs), "runs": about(runs)}
    runs = [run.at_usual_speed() for run in runs]
    if isinstance(scenario, Closed | Acceptance):
        found = throughput.compare(runs, systems)
        speeds = {
            point: {name: list(one.values()) for name, one in of.items()}
            for point, of in throughput.speeds(runs, systems).items()
        }
        document |= {"tokens_per_s": speeds, "compared": [asdict(one) for one in found]}
        return Judged(throughput.bars(number, found), document)
    if isinstance(scenario, SLOMix):
        limits = tpot_limits(scenario, stock) if stock is not None else {}
        found_slo = attainment.attained(runs, limits) if runs else []
        document |= {"tpot_s": limits, "attained": [asdict(one) for one in found_slo]}
        return Judged(attainment.bars(number, runs, systems, limits), document)
    found_latency = latency.compare(runs, systems)
    document |= {"latency_s": quantiles(runs), "compared": [asdict(one) for one in found_latency]}
    return Judged(latency.bars(number, found_latency, latency.switching(runs, systems)), document)


def tpot_limits(scenario: SLOMix, stock: Calibration) -> dict[str, float]:
    return {one.name: one.step_times * stock.step_s_at_batch_8 for one in scenario.classes}


def memory(runs: Sequence[Run]) -> dict[str, float]:
    """Median over the repeats, by system."""
    return {name: median(run.memory_mb for run in runs if run.system == name) for name in _systems(runs)}


def quantiles(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """phase -> system -> the 10th, 50th, 90th and 99th percentile of request latency, in seconds, all repeats."""
    return {
        phase: {
            name: [round(float(one), 4) for one in np.percentile(list(values.values()), (10, 50, 90, 99))]
            for name in _systems(runs)
            if (values := latency.latencies(runs, name, phase))
        }
        for phase in (*latency.phases(runs), latency.WHOLE)
        if runs
    }


def about(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each run: when, how busy the machine was, and what the controller did at each point."""
    return [
        {
            "system": run.system, "repeat": run.repeat, "sitting": run.sitting, "finished_at": run.finished_at,
            "load_average": run.load_average,
            "points": [
                {
                    "name": point.name, "tokens_per_s": round(point.tokens_per_s, 1),
                    "accepted_per_draft": point.accepted_per_draft, "others_cores": point.others_cores,
                    "slowness": point.slowness,
                    "controller": controller_of(point),
                }
                for point in run.points
            ],
        }
        for run in runs
    ]  # fmt: skip


def _systems(runs: Sequence[Run]) -> list[str]:
    return sorted({run.system for run in runs})
