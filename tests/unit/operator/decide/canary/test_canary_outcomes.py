"""What becomes of a candidate once it is judged."""

from __future__ import annotations

from outrider_crds.conditions import ConditionType as C
from outrider_crds.runtime_state import CanaryState
from outrider_operator.cluster_model import CONFIG_MAP
from outrider_operator.decide import decide

from tests.unit.operator.decide.canary.canary_world import CANARY, GAIN, HEAD, LOSS, NAME, arm, under_way
from tests.unit.operator.decide.world import EAGLE, PLD


def test_a_better_candidate_is_rolled_out() -> None:
    world = under_way()
    stable = world.revision()
    assert world.phase == "Measuring"
    assert world.reasons() == ("True/CanaryMeasuring", "False/CanaryRunning")
    world.measure_arms(1000, GAIN)
    assert world.phase == "Promoting"
    candidate = world.rollout.candidate
    assert (world.revision(), world.rollout.stable) == (candidate, stable)
    assert world.canary is not None
    assert world.canary["spec"]["replicas"] == 0
    world.end_canary()
    world.roll_out()
    world.report()
    assert world.phase == "Successful"
    world.replace_pods()
    assert world.canary is None
    assert (CONFIG_MAP, f"{NAME}-hot") not in world.objects
    assert (CONFIG_MAP, f"chat-{candidate}c") not in world.objects
    assert world.reasons() == ("False/Complete", "True/UpToDate")
    assert world.rollout.summary.startswith("Successful 1000 +10.0% [")


def test_a_worse_candidate_is_taken_back_and_stays_away() -> None:
    world = under_way()
    stable = world.revision()
    world.measure_arms(1000, LOSS)
    assert (world.phase, world.rollout.cause, world.revision()) == ("Failed", "Worse", stable)
    assert world.reasons() == ("False/CanaryFailed", "False/CanaryFailed")
    assert "below rollout.canary.leastGainPercent (-3)" in world.condition(C.PROGRESSING).message
    assert "Gain -10.0% [" in world.condition(C.PROGRESSING).message
    assert world.canary is not None
    assert world.canary["spec"]["replicas"] == 0
    world.end_canary()
    world.now += 100_000
    world.settle()
    assert (world.phase, world.revision()) == ("Failed", stable)
    assert world.reason(C.READY) == "True/EndpointReady"


def test_a_failed_candidate_is_measured_against_another_stable() -> None:
    """Bug: it stayed failed after another pool had been rolled out without a canary."""
    world = under_way()
    candidate = world.rollout.candidate
    world.measure_arms(1000, LOSS)
    world.end_canary()
    world.change(draftPool=[PLD, HEAD], rollout={"strategy": "RollingUpdate", "maxSurge": 1})
    world.replace_pods()
    world.report()
    stable = world.revision()
    world.change(draftPool=[PLD, EAGLE], rollout=CANARY)
    assert (world.phase, world.rollout.candidate, world.rollout.stable) == ("Starting", candidate, stable)
    assert world.hosted == ["pld", "eagle", "eagle-was"]


def test_no_traffic_is_inconclusive_and_holds() -> None:
    world = under_way(rollout=CANARY | {"canary": {"timeout": "30m"}})
    stable = world.revision()
    world.watch(1800)
    assert (world.phase, world.rollout.cause) == ("Inconclusive", "NoTraffic")
    assert world.reasons() == ("False/CanaryInconclusive", "False/CanaryInconclusive")
    assert world.canary is not None
    assert world.canary["spec"]["replicas"] == 1
    assert world.revision() == stable


def test_an_end_by_time_is_looked_for_without_any_event() -> None:
    world = under_way()
    plan = decide(world.observed(), world.settings)
    assert plan.requeue_after_s is not None
    assert plan.requeue_after_s <= 6 * 3600


def test_a_way_back_is_not_measured() -> None:
    world = under_way()
    stable = world.revision()
    world.measure_arms(1000, GAIN)
    world.end_canary()
    world.replace_pods()
    assert world.phase == "Successful"
    world.change(draftPool=[PLD])
    assert world.revision() == stable


def test_other_changes_wait_while_a_failed_pool_is_in_the_spec() -> None:
    """docs/explanation/draft-canaries.md promises both."""
    world = under_way()
    stable = world.revision()
    world.measure_arms(1000, LOSS)
    world.end_canary()
    world.settings = type(world.settings)(
        runtime_image_gpu="outrider/runtime:2", runtime_image_cpu="outrider/runtime-cpu:2", runtime_upgrade_percent=100
    )
    world.settle()
    assert (world.phase, world.revision()) == ("Failed", stable)
    world.change(engine={"maxModelLen": 512})
    assert (world.phase, world.revision()) == ("Starting", stable)
    world.change(draftPool=[PLD])
    template = world.deployment()["spec"]["template"]["spec"]
    assert world.revision() != stable
    assert template["containers"][0]["image"] == "outrider/runtime-cpu:2"


def test_a_class_that_is_met_less_often_fails_it() -> None:
    world = under_way()
    stable, candidate = arm(2000, 100.0), arm(2000, 110.0).model_copy(update={"attained": {"chat": 1600}})
    world.measure_arms(canary=CanaryState(id=world.order["id"], stable=stable, candidate=candidate))
    assert (world.phase, world.rollout.cause) == ("Failed", "SLOLowered")
    assert "SLO class chat" in world.rollout.message
