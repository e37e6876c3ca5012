"""What the spec, the operator and the pods may do to a canary under way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_operator.cluster_model import DEPLOYMENT
from outrider_operator.decide import decide

from tests.unit.operator.decide.canary.canary_world import CANARY, GAIN, HEAD, LOSS, NAME, under_way
from tests.unit.operator.decide.world import EAGLE, PLD


def test_a_second_patch_supersedes_the_first() -> None:
    world = under_way()
    first, stable = world.rollout.candidate, world.revision()
    world.patch(draftPool=[PLD, HEAD])
    plan = decide(world.observed(), world.settings)
    assert [event.reason for event in plan.events if event.reason.startswith("Canary")] == [
        "CanarySuperseded",
        "CanaryStarted",
    ]
    world.settle()
    assert world.rollout.candidate != first
    assert (world.phase, world.rollout.stable) == ("Starting", stable)
    assert world.rollout.sums == []
    assert world.canary is not None
    assert world.canary["spec"]["strategy"] == {"type": "Recreate"}
    world.start_canary()
    world.measure_arms(1000, GAIN)
    assert world.phase == "Promoting"


def test_a_patch_back_cancels() -> None:
    world = under_way()
    stable = world.revision()
    world.patch(draftPool=[PLD])
    plan = world.settle()
    assert (world.phase, world.revision(), world.canary) == ("Cancelled", stable, None)
    assert world.reasons()[1] == "True/UpToDate"
    assert plan.is_idle


def test_scale_and_hot_changes_go_on_with_the_same_canary() -> None:
    world = under_way()
    attempt = world.order["id"]
    world.change(replicas=5, speculation={"mode": "Off", "maxDraftTokens": 2})
    assert (world.phase, world.order["id"]) == ("Measuring", attempt)
    assert world.deployment()["spec"]["replicas"] == 5
    assert world.canary_hot().mode == "Off"
    assert world.canary_hot().max_draft_tokens == 2


def test_another_candidate_percent_counts_from_zero() -> None:
    """Bug: sums of unequal shares were pooled, which can reverse the verdict."""
    world = under_way()
    attempt, pods = world.order["id"], set(world.pods)
    world.change(rollout={**CANARY, "canary": {"candidatePercent": 5}})
    assert (world.phase, world.rollout.candidate_percent, world.rollout.sums) == ("Starting", 5, [])
    assert (world.order["candidatePercent"], world.order["id"] != attempt) == (5, True)
    assert set(world.pods) == pods
    world.measure_arms(1000, GAIN)
    assert world.phase == "Promoting"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "back", "said"),
    [
        ({"speculation": {"mode": "Off"}}, {"speculation": {}}, "speculation.mode is Off."),
        ({"speculation": {"draftPrefill": "Never"}}, {"speculation": {}}, "drafter eagle does not run."),
        ({"draftPool": [PLD, {**EAGLE, "paused": True}]}, {"draftPool": [PLD, EAGLE]}, "Drafter eagle is paused."),
    ],
)
@pytest.mark.parametrize("gain", [GAIN, 0.0, LOSS])
def test_nothing_is_decided_while_drafters_do_not_run(
    change: dict[str, Any], back: dict[str, Any], said: str, gain: float
) -> None:
    """Bug: both arms decoded plainly, were as good as each other, and any draft was promoted."""
    world = under_way()
    world.change(**change)
    world.measure_arms(100_000, gain)
    assert (world.phase, world.rollout.requests) == ("Measuring", 100_000)
    assert said in world.condition(C.PROGRESSING).message
    world.now += 7 * 3600
    world.settle()
    assert world.phase == "Measuring"
    world.change(**back)
    assert world.phase == ("Failed" if gain == LOSS else "Promoting")


def test_a_service_at_zero_keeps_the_sums_and_goes_on_later() -> None:
    world = under_way()
    world.measure_arms(50)
    world.change(replicas=0)
    assert world.canary is not None
    assert world.canary["spec"]["replicas"] == 0
    world.pods.clear()
    world.states.clear()
    world.settle()
    assert world.rollout.requests == 50
    world.change(replicas=2)
    world.roll_out()
    world.processes += 1
    world.start_canary()
    world.measure_arms(30)
    assert (world.phase, world.rollout.requests) == ("Measuring", 80)


def test_a_paused_service_decides_nothing() -> None:
    world = under_way()
    world.change(paused=True)
    world.measure_arms(1000, LOSS)
    assert world.phase == "Measuring"
    assert world.reasons()[0] == "False/Paused"
    world.change(paused=False)
    assert world.phase == "Failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "back"),
    [
        ({"paused": True}, {"paused": False}),
        ({"replicas": 0}, {"replicas": 2}),
        ({"speculation": {"mode": "Off"}}, {"speculation": {"mode": "ClosedLoop"}}),
        ({"draftPool": [PLD, {"name": "eagle", "method": "Nonsense"}]}, {"draftPool": [PLD, EAGLE]}),
    ],
)
def test_time_without_decisions_does_not_use_up_the_timeout(change: dict[str, Any], back: dict[str, Any]) -> None:
    """Bug: seven hours of a pause were a verdict at its end: Inconclusive, or a promotion without evidence."""
    world = under_way(rollout=CANARY | {"canary": {"timeout": "30m"}})
    attempt = world.rollout.started_at
    world.change(**change)
    world.now += 7 * 3600
    world.settle()
    world.change(**back)
    assert (world.phase, world.rollout.started_at) == ("Measuring", attempt)
    assert 7 * 3600 <= world.rollout.held_seconds <= 7 * 3600 + 60
    world.watch(1800)
    assert world.phase == "Inconclusive"


def test_operator_without_status_resumes_from_the_deployment() -> None:
    world = under_way()
    world.measure_arms(100, 0.02)
    before = world.rollout
    world.services["chat"]["status"].pop("rollout")
    world.settle()
    after = world.rollout
    assert (after.phase, after.candidate, after.started_at) == (before.phase, before.candidate, before.started_at)
    assert after.requests == 100


def test_a_record_of_a_later_start_does_not_loop() -> None:
    """Bug: each look preferred the record, began a canary, and left the record as it was."""
    world = under_way()
    assert world.canary is not None
    annotations = world.canary["metadata"]["annotations"]
    record = json.loads(annotations["outrider.dev/rollout"])
    later = {**record, "candidate": "abc", "startedAt": "2099-01-01T00:00:00Z"}
    annotations["outrider.dev/rollout"] = json.dumps(later)
    before = world.rollout
    world.settle()
    assert (world.phase, world.rollout.candidate) == ("Measuring", before.candidate)
    assert json.loads(world.canary["metadata"]["annotations"]["outrider.dev/rollout"])["candidate"] == before.candidate


def test_operator_without_deployment_resumes_from_the_status() -> None:
    world = under_way()
    world.measure_arms(100)
    del world.objects[DEPLOYMENT, NAME]
    world.end_canary()
    world.settle()
    world.processes += 1
    world.start_canary()
    world.measure_arms(20)
    assert (world.phase, world.rollout.requests) == ("Measuring", 120)


def test_another_strategy_rolls_out_at_once() -> None:
    world = under_way()
    world.change(rollout={"strategy": "RollingUpdate"})
    assert (world.phase, world.canary, world.revision()) == ("Cancelled", None, world.rollout.candidate)
    assert "is no longer DraftCanary: candidate" in world.rollout.message


def test_a_newer_release_is_left_alone() -> None:
    """The operator is rolled back in the midst of a canary."""
    world = under_way()
    world.services["chat"]["status"]["rollout"]["phase"] = "Shadowing"
    before, stable = json.dumps(world.canary), world.revision()
    world.measure_arms(1000, GAIN)
    assert (world.phase, json.dumps(world.canary), world.revision()) == ("Shadowing", before, stable)
