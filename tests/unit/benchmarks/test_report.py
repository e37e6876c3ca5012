"""What `make bench` leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.analysis import plots
from tests.benchmarks.analysis.bar import Bar, judged
from tests.benchmarks.analysis.controller import controller_of
from tests.benchmarks.analysis.report import read_result, rounded, table, write_summary
from tests.benchmarks.evidence.raw import MeasuredPoint
from tests.unit.benchmarks.runs import SYSTEMS, outcome, run, speed_runs


def bar(scenario: int, ratio: float) -> Bar:
    return judged(Bar(scenario, "ours by best", 0.97, at_least=True, baseline="eagle-k1 (high at 4)", ratio=ratio))


def test_one_scenario_measured_anew_leaves_the_others_entries(tmp_path: Path) -> None:
    write_summary([bar(1, 1.0), bar(3, 0.5)], {"commit": "old"}, tmp_path)
    write_summary([bar(3, 0.99)], {"commit": "new"}, tmp_path)
    summary = read_result("summary", tmp_path)
    assert summary is not None
    assert [(entry["scenario"], entry["ratio"], entry["met"]) for entry in summary["bars"]] == [
        (1, 1.0, True),
        (3, 0.99, True),
    ]
    assert {number: one["commit"] for number, one in summary["measured"].items()} == {"1": "old", "3": "new"}


def test_a_missed_bar_reads_as_one() -> None:
    lines = table([bar(1, 0.9), bar(1, 1.0), Bar(2, "not run", 0.8, at_least=True)]).splitlines()
    assert ["MISSED" in line for line in lines] == [True, False, False]
    assert "?" in lines[2]


def test_figures_have_four_digits_and_no_nan() -> None:
    assert rounded({"a": [0.123456, float("nan")], "b": (12345.6, 7, "x")}) == {
        "a": [0.1235, None],
        "b": [12350.0, 7, "x"],
    }


def test_plots_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    runs = speed_runs({"high at 4": {"none": [100], "eagle-k1": [120], "ours": [125]}, "high at 16": {"none": [300]}})
    plots.plot_throughput(runs, SYSTEMS, "t", tmp_path / "throughput.png")
    plots.plot_latency([run("none", 1, {"p": [outcome()]})], SYSTEMS, "t", tmp_path / "latency.png")
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in tmp_path.glob("*.png"))
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_the_controllers_part_is_the_difference_of_its_counters() -> None:
    def state(steps: int, accepted: int) -> dict[str, object]:
        document = {
            "service": "s", "namespace": "n", "revision": "r", "configHash": "", "startedAt": 0, "now": 1,
            "ready": True, "pluginActive": True, "steps": steps, "busyS": 0.01 * steps, "decisionS": 1e-4 * steps,
            "draftLengthSteps": [steps, 0, accepted],
            "drafters": [{"name": "eagle", "loaded": True, "tried": 2 * accepted, "accepted": accepted}],
        }  # fmt: skip
        return json.loads(json.dumps(document))  # type: ignore[no-any-return]

    found = controller_of(MeasuredPoint("p", 1.0, (), None, 0.0, 1.0, state(100, 10), state(300, 60)))
    assert found is not None
    assert found["steps"] == 200
    assert found["decision_us"] == 100.0
    assert found["step_ms"] == 10.0
    assert found["drafters"]["eagle"]["acceptance"] == 0.5
    assert found["mean_draft_length"] == 0.4
    assert controller_of(MeasuredPoint("p", 1.0, (), None, 0.0, 1.0, None, None)) is None
