"""Every kind of scenario becomes bars and a document that JSON can hold."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.analysis.judge import judge
from tests.benchmarks.analysis.report import rounded
from tests.benchmarks.evidence.plan import Calibration, load_name
from tests.benchmarks.evidence.scenario import (
    Acceptance,
    Closed,
    ComparedScenario,
    Cost,
    Size,
    SLOMix,
    load_scenarios,
)
from tests.unit.benchmarks.runs import SYSTEMS, outcome, run

STOCK = Calibration(capacity_per_s=10.0, step_s_at_batch_8=0.03, work_us=100.0)
COMPARED = [one for one in load_scenarios(Size.DEFAULT) if not isinstance(one, Cost)]


@pytest.mark.parametrize("scenario", COMPARED, ids=lambda one: one.title)
def test_a_scenario_is_judged_from_its_runs(scenario: ComparedScenario) -> None:
    point = load_name(scenario.loads[0]) if isinstance(scenario, SLOMix) else "high at 4"
    slo_class = scenario.classes[0].name if isinstance(scenario, SLOMix) else ""
    runs = [
        run(system, repeat, {point: [outcome(slo_class=slo_class)] * 4})
        for system in ("none", "eagle-k1", "ours")
        for repeat in (1, 2)
    ]
    judged = judge(scenario, runs, SYSTEMS, STOCK)
    assert all(bar.scenario == scenario.scenario for bar in judged.bars)
    assert any(bar.ratio is not None for bar in judged.bars)
    document = json.loads(json.dumps(rounded(judged.document)))
    assert document["memory_mb"] == {"eagle-k1": 1000.0, "none": 1000.0, "ours": 1000.0}
    assert len(document["runs"]) == len(runs)
    assert ("tokens_per_s" in document) is isinstance(scenario, Closed | Acceptance)
