"""What the status says about figures, and when it is written."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_crds.runtime_state import (
    ChoiceState,
    DrafterMemory,
    DrafterReport,
)
from outrider_operator.decide import decide
from outrider_operator.decide.status_changes import status_write
from outrider_operator.figure_windows import FigureWindows, WindowCounts

from tests.unit.operator.decide.window_counts import drafter, slo_class, window_counts
from tests.unit.operator.decide.world import SETTINGS, World, manifest


def figures(**fields: Any) -> WindowCounts:
    """A busy window in which speculation is used and pays."""
    busy: dict[str, Any] = {
        "output_tokens": 6000,
        "request_steps": 2000,
        "drafters": {"pld": drafter(3000, 2000, 1500)},
        "slo_classes": {"chat": slo_class(100, 99)},
        "steps": 1000,
        "speculative_steps": 1000,
        "probes": 30,
        "weight": 900,
        "weighted_ratio": 900 * 1.5,
    }
    return window_counts(**busy | fields)


GOOD = figures()
BAD = figures(weighted_ratio=900 * 0.75, slo_classes={"chat": slo_class(100, 50)})
QUIET = figures(output_tokens=3, slo_classes={"chat": slo_class(1, 0)})


def measured(world: World, current: WindowCounts | None, previous: WindowCounts | None, error: str = "") -> None:
    world.figures = FigureWindows(current, previous, error)
    world.now += 60
    world.settle()


@pytest.fixture
def serving() -> World:
    world = World(manifest()).served()
    world.report_states(drafters=[DrafterReport(name="pld", loaded=True)], choice=ChoiceState(reason="Pays"))
    return world


@pytest.mark.parametrize("kind", [C.GOODPUT_HEALTHY, C.SLO_ATTAINED])
def test_a_verdict_changes_only_after_two_windows(serving: World, kind: C) -> None:
    """One bad minute is no alarm, one good one no all-clear."""
    measured(serving, GOOD, None)
    assert serving.condition(kind).status == "True"
    measured(serving, BAD, GOOD)
    assert serving.condition(kind).status == "True"
    measured(serving, BAD, BAD)
    assert serving.condition(kind).status == "False"
    measured(serving, GOOD, BAD)
    assert serving.condition(kind).status == "False"
    measured(serving, GOOD, GOOD)
    assert serving.condition(kind).status == "True"
    assert serving.condition(C.READY).status == "True"


@pytest.mark.parametrize("kind", [C.GOODPUT_HEALTHY, C.SLO_ATTAINED])
def test_too_little_traffic_is_unknown_never_bad(serving: World, kind: C) -> None:
    """Unknown/NoTraffic below a least sample; missing is never failed."""
    measured(serving, QUIET, QUIET)
    assert serving.reason(kind) == "Unknown/NoTraffic"
    measured(serving, GOOD, GOOD)
    measured(serving, QUIET, QUIET)
    assert serving.reason(kind) == "Unknown/NoTraffic"


@pytest.mark.parametrize("kind", [C.GOODPUT_HEALTHY, C.SLO_ATTAINED, C.SPECULATION_ACTIVE])
def test_silent_metrics_source_is_unknown_with_its_error(serving: World, kind: C) -> None:
    """MetricsUnavailable: not NoTraffic, not a failure."""
    measured(serving, None, None, "Prometheus does not answer: timeout.")
    assert serving.reason(kind) == "Unknown/MetricsUnavailable"
    assert "timeout" in serving.condition(kind).message


def test_restarted_operator_keeps_verdict_until_it_has_measured(serving: World) -> None:
    """What hysteresis needs stands in the status, not in memory."""
    measured(serving, BAD, BAD)
    measured(serving, None, None)
    assert serving.reason(C.SLO_ATTAINED) == "False/Missed"


def test_restarted_operator_keeps_figures_until_it_has_measured(serving: World) -> None:
    """An upgrade of the operator must not blank `kubectl get`, nor make SpeculationActive flap."""
    measured(serving, GOOD, GOOD)
    before = serving.observed().status
    assert before.summary is not None
    measured(serving, None, None)
    after = serving.observed().status
    assert (after.summary, after.goodput, after.slo_classes, after.drafts) == (
        before.summary, before.goodput, before.slo_classes, before.drafts,
    )  # fmt: skip
    assert serving.reason(C.SPECULATION_ACTIVE) == "True/Pays"


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (GOOD, "True/Pays"),
        (figures(drafters={"pld": drafter(30, 10, 20)}), "False/NotWorthIt"),
        (BAD, "False/MeasuredSlower"),
        (QUIET, "Unknown/NoTraffic"),
        (None, "Unknown/Measuring"),
    ],
)
def test_speculation_active_says_whether_it_is_used_and_pays(
    serving: World, window: WindowCounts | None, expected: str
) -> None:
    """k = 0 is a right choice, not a fault."""
    measured(serving, window, None)
    assert serving.reason(C.SPECULATION_ACTIVE) == expected


@pytest.mark.parametrize("kind", [C.SPECULATION_ACTIVE, C.GOODPUT_HEALTHY])
def test_a_loss_within_noise_is_no_loss(serving: World, kind: C) -> None:
    """Two probes while a pod started say 0.9 and mean nothing: no figure, no alarm, and the sentence says why."""
    unsure = figures(weight=50, weighted_ratio=50 * 0.9)
    measured(serving, unsure, unsure)
    assert serving.condition(kind).status == "True"
    assert "does not differ from 1 beyond noise yet, it is between 0.617 and 1.18" in serving.condition(kind).message
    status = serving.observed().status
    assert status.summary is not None
    assert status.goodput is not None
    assert (status.summary.speedup, status.goodput.speedup, status.goodput.speedup_range) == ("near 1x", "", "")


def test_speed_up_needs_three_probes(serving: World) -> None:
    """Bug: a pod that had just started said 3.23x after one probe."""
    single = figures(probes=1, weight=900, weighted_ratio=900 * 1.5)
    measured(serving, single, single)
    assert serving.reason(C.GOODPUT_HEALTHY) == "Unknown/Measuring"
    goodput = serving.observed().status.goodput
    assert goodput is not None
    assert goodput.speedup == ""


def test_speed_up_of_three_probes_has_a_wide_range(serving: World) -> None:
    """Student's t with two degrees of freedom: 4.53 standard errors of 1 / 30 on either side of 1.5."""
    few = figures(probes=3)
    measured(serving, few, few)
    goodput = serving.observed().status.goodput
    assert goodput is not None
    assert goodput.speedup_range == "1.35-1.65"


def test_speed_up_is_never_above_the_tokens_of_a_step(serving: World) -> None:
    """Bug: 3.23x, between 2.63 and 3.82, with 1.46 tokens a step. Such a step takes no less time than a plain one."""
    impossible = figures(rare={"drafters": {"pld": drafter(3000, 920)}}, weighted_ratio=900 * 3.23)
    measured(serving, impossible, impossible)
    goodput = serving.observed().status.goodput
    assert goodput is not None
    assert (goodput.speedup, goodput.speedup_range) == ("1.46", "1.46-1.46")


def test_a_few_steps_that_speculate_cannot_halve_the_goodput(serving: World) -> None:
    """3% of the steps speculate at half the goodput: 1.5% are lost, not half."""
    rare = figures(speculative_steps=30, weighted_ratio=900 * 0.5)
    measured(serving, rare, rare)
    status = serving.observed().status
    assert status.goodput is not None
    assert float(status.goodput.speedup) == pytest.approx(0.985, abs=0.0001)


@pytest.mark.parametrize(
    "reported",
    [
        {"weight": 1e-9, "weighted_ratio": 1e15},
        {"weight": 1e-310, "weighted_ratio": 1e15},
        {"weight": 1e15, "weighted_ratio": 0.0},
        {"weight": 0, "baseline_tokens": 1e-310, "baseline_s": 1, "speculative_tokens": 1e15, "speculative_s": 1},
    ],
)
def test_whatever_a_pod_reports_is_no_more_than_a_figure(serving: World, reported: dict[str, float]) -> None:
    """Absurd counters make neither an error nor a speed-up beyond belief."""
    absurd = figures(**reported)
    measured(serving, absurd, absurd)
    goodput = serving.observed().status.goodput
    assert goodput is not None
    assert float(goodput.speedup or 1) <= 100


def test_a_pool_that_is_paused_as_a_whole_has_no_drafter(serving: World) -> None:
    """Nothing was compared: plain decoding is not said to be faster."""
    serving.patch(draftPool=[{"name": "pld", "method": "PromptLookup", "promptLookup": {}, "paused": True}])
    measured(serving, GOOD, GOOD)
    assert serving.reason(C.SPECULATION_ACTIVE) == "False/NoDrafter"
    assert "paused" in serving.condition(C.SPECULATION_ACTIVE).message


def test_pods_of_the_previous_release_report_their_speed_up(serving: World) -> None:
    """They report tokens and seconds, and not how sure they are."""
    measured(
        serving,
        figures(weight=0, baseline_tokens=100, baseline_s=2, speculative_tokens=300, speculative_s=4),
        None,
    )
    status = serving.observed().status
    assert status.goodput is not None
    assert (status.goodput.speedup, status.goodput.speedup_range) == ("1.5", "1.4-1.6")


def test_speculation_that_is_off_or_has_no_drafter_says_so(serving: World) -> None:
    """Off and NoDrafter; a drafter that could not load is named with its reason."""
    serving.report(drafters=[DrafterReport(name="pld", loaded=False, reason="no such file")])
    assert serving.reason(C.SPECULATION_ACTIVE) == "False/NoDrafter"
    assert serving.observed().status.drafts[0].reason == "no such file"
    serving.change(speculation={"mode": "Off"})
    assert serving.reason(C.SPECULATION_ACTIVE) == "False/Off"


def test_a_draft_says_what_its_memory_costs() -> None:
    """Weights and KV take concurrency even at k = 0; of several pods, the one where that is most."""
    world = World(manifest(replicas=2)).served()
    assert world.observed().status.drafts[0].memory == ""
    costs = DrafterMemory(weight_bytes=1536 * 1024, kv_bytes_per_token=4096, concurrency_percent=1.234)
    world.report(drafters=[DrafterReport(name="pld", loaded=True, memory=costs)])
    assert world.observed().status.drafts[0].memory == "1.5Mi of weights and 4Ki a token cost 1.23% of concurrency"
    pod_name = next(iter(world.states))
    more = DrafterReport(name="pld", loaded=True, memory=costs.model_copy(update={"concurrency_percent": 20.0}))
    world.states[pod_name] = world.states[pod_name].model_copy(update={"drafters": [more]})
    world.settle()
    assert world.observed().status.drafts[0].memory.endswith("20% of concurrency")


def test_draft_status_names_the_block_drafter() -> None:
    """A manifest says Block alone; which drafter it is stands in the checkpoint."""
    world = World(manifest()).served()
    assert world.observed().status.drafts[0].kind == ""
    world.report(drafters=[DrafterReport(name="pld", loaded=True, kind="DSpark")])
    assert world.observed().status.drafts[0].kind == "DSpark"


def test_a_draft_is_loaded_when_every_ready_pod_has_it() -> None:
    """One pod without it is enough for False, with the reason. No report at all is not True."""
    world = World(manifest(replicas=2)).served()
    world.report(drafters=[])
    assert not world.observed().status.drafts[0].loaded
    world.report(drafters=[DrafterReport(name="pld", loaded=True)])
    assert world.observed().status.drafts[0].loaded
    pod_name = next(iter(world.states))
    without = [DrafterReport(name="pld", loaded=False, reason="out of memory")]
    world.states[pod_name] = world.states[pod_name].model_copy(update={"drafters": without})
    world.settle()
    assert (world.observed().status.drafts[0].loaded, world.observed().status.drafts[0].reason) == (
        False,
        "out of memory",
    )


def test_the_printer_columns_name_the_worst_class() -> None:
    """GOODPUT, SPEEDUP, ACCEPTANCE, SLO."""
    world = World(manifest(sloClasses=[{"name": "chat", "tpot": "50ms"}, {"name": "batch", "tpot": "1s"}])).served()
    measured(world, figures(slo_classes={"chat": slo_class(100, 91), "batch": slo_class(100, 99)}), None)
    summary, goodput = world.observed().status.summary, world.observed().status.goodput
    assert summary is not None
    assert goodput is not None
    assert (summary.goodput, summary.speedup, summary.acceptance) == ("100 tok/s", "1.5x", "66.7%")
    assert summary.slo == "91% chat"
    assert (goodput.baseline_tokens_per_second, goodput.pods, goodput.window) == ("66.7", "1/1", "60s")
    assert world.observed().status.slo_classes[0].tpot_p50.endswith("ms")


@pytest.mark.parametrize(
    ("window", "columns"),
    [
        (None, ("measuring", "measuring", "measuring", "measuring")),
        (QUIET, ("0.05 tok/s", "idle", "66.7%", "idle")),
        (figures(probes=0, weight=0, weighted_ratio=0), ("100 tok/s", "measuring", "66.7%", "99% chat")),
        (
            figures(drafters={"pld": drafter(1, 0, 1)}, probes=0, weight=0, weighted_ratio=0, slo_classes={}),
            ("100 tok/s", "plain", "measuring", "measuring"),
        ),
    ],
    ids=["first minute", "quiet", "few probes", "plain decoding"],
)
def test_column_without_a_figure_says_why(
    serving: World, window: WindowCounts | None, columns: tuple[str, str, str, str]
) -> None:
    """Bug: after a promotion SPEEDUP, ACCEPTANCE and SLO were empty for minutes, and nothing said why."""
    measured(serving, window, window)
    summary = serving.observed().status.summary
    assert summary is not None
    assert (summary.goodput, summary.speedup, summary.acceptance, summary.slo) == columns


def test_promoted_pool_shows_its_canarys_speed_up_before_probes(serving: World) -> None:
    """Bug: the canary had just measured +24.5%, and the column was empty."""
    (state,) = serving.states.values()
    arms = [{"name": "stable", "speedup": "1.1"}, {"name": "candidate", "speedup": "1.37"}]
    rollout = {"phase": "Successful", "candidate": state.revision, "stable": "old", "arms": arms}
    serving.services["chat"]["status"]["rollout"] = rollout
    few = figures(probes=1)
    serving.figures = FigureWindows(few, few)
    assert _speedup_column(serving) == "1.37x in canary"
    serving.figures = FigureWindows(GOOD, GOOD)
    assert _speedup_column(serving) == "1.5x"
    rollout["candidate"] = "of another pool"
    serving.figures = FigureWindows(few, few)
    assert _speedup_column(serving) == "measuring"


def _speedup_column(world: World) -> str:
    summary = decide(world.observed(), SETTINGS).status.summary
    assert summary is not None
    return summary.speedup


def test_an_infeasible_slo_names_the_best_value() -> None:
    """The best value for a single request comes from the profile, so it is known before any traffic."""
    world = World(manifest(sloClasses=[{"name": "chat", "tpot": "1ms"}], speculation={"mode": "Off"})).served()
    assert world.reason(C.SLO_ATTAINED) == "False/Infeasible"
    assert "21ms" in world.condition(C.SLO_ATTAINED).message
    assert "chat (1ms)" in world.condition(C.SLO_ATTAINED).message
    world.change(sloClasses=[{"name": "chat", "tpot": "22ms"}])
    assert world.reason(C.SLO_ATTAINED) == "Unknown/NoTraffic"


def test_slo_that_requests_meet_is_feasible_despite_the_profile(serving: World) -> None:
    """What was measured on real requests wins over the model."""
    serving.patch(sloClasses=[{"name": "chat", "tpot": "1ms"}], speculation={"mode": "Off"})
    measured(serving, GOOD, GOOD)
    assert serving.reason(C.SLO_ATTAINED) == "True/Attained"
    measured(serving, BAD, BAD)
    assert serving.reason(C.SLO_ATTAINED) == "False/Infeasible"


def test_load_at_the_crossover_does_not_flip_the_condition(serving: World) -> None:
    """Each flip is a write and an event."""
    measured(serving, GOOD, None)
    for share in (0.04, 0.06, 0.03, 0.055):
        measured(serving, figures(drafters={"pld": drafter(300, 200, 2000 * share)}), None)
        assert serving.reason(C.SPECULATION_ACTIVE) == "True/Pays"
    measured(serving, figures(drafters={"pld": drafter(300, 200, 20)}), None)
    measured(serving, figures(drafters={"pld": drafter(300, 200, 80)}), None)
    assert serving.reason(C.SPECULATION_ACTIVE) == "False/NotWorthIt"


def test_conditions_are_written_at_once_figures_every_15_s(serving: World) -> None:
    """Figures are written at most four times a minute, and only if their three digits changed."""
    measured(serving, GOOD, GOOD)
    old = serving.observed().status
    serving.figures = FigureWindows(figures(output_tokens=6001), GOOD)
    assert not status_write(old, serving.reconcile().status, serving.now, serving.now - 60).is_due
    serving.figures = FigureWindows(figures(output_tokens=7000), GOOD)
    new = serving.reconcile().status
    assert status_write(old, new, serving.now, serving.now - 5).again_in_s == pytest.approx(10)
    assert status_write(old, new, serving.now, serving.now - 15).is_due
    assert status_write(old, new, serving.now, None).is_due
    serving.figures = FigureWindows(BAD, BAD)
    assert status_write(old, serving.reconcile().status, serving.now, serving.now).is_due
