"""When a changed pool begins a canary, against which revision, and what its pod hosts."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_crds.runtime_state import DrafterReport
from outrider_operator.cluster_model import CONFIG_MAP, DEPLOYMENT
from outrider_operator.decide.pods.pod_states import revision_of

from tests.unit.operator.decide.canary.canary_world import CANARY, GAIN, HEAD, LOSS, NAME, CanaryWorld, under_way
from tests.unit.operator.decide.world import EAGLE, PLD, World, manifest


def test_a_patched_pool_is_hosted_together_with_the_running_one() -> None:
    world = CanaryWorld()
    stable, pods = world.revision(), set(world.pods)
    world.change(draftPool=[PLD, EAGLE])
    assert world.canary is not None
    assert world.canary["spec"]["replicas"] == 1
    assert world.hosted == ["pld", "eagle"]
    assert (world.order["stable"], world.order["candidate"], world.order["candidatePercent"]) == (
        ["pld"],
        ["pld", "eagle"],
        50,
    )
    assert world.revision() == stable
    assert set(world.pods) == pods
    assert world.phase == "Starting"
    assert world.reasons() == ("True/CanaryStarting", "False/CanaryRunning")


def test_a_changed_drafter_of_the_same_name_is_hosted_twice() -> None:
    world = CanaryWorld(draftPool=[PLD, EAGLE])
    world.patched(PLD, HEAD)
    assert world.hosted == ["pld", "eagle", "eagle-was"]
    assert (world.order["stable"], world.order["candidate"]) == (["pld", "eagle-was"], ["pld", "eagle"])


def test_a_removed_drafter_is_hosted_for_the_stable_arm() -> None:
    world = CanaryWorld(draftPool=[PLD, EAGLE])
    world.patched(PLD)
    assert world.hosted == ["pld", "eagle"]
    assert (world.order["stable"], world.order["candidate"]) == (["pld", "eagle"], ["pld"])


@pytest.mark.parametrize(
    "change", [{"engine": {"maxModelLen": 512}}, {"replicas": 3}, {"draftPool": [{**PLD, "paused": True}]}]
)
def test_a_change_that_leaves_the_pool_alone_has_no_canary(change: dict[str, Any]) -> None:
    world = CanaryWorld()
    world.change(**change)
    assert world.canary is None
    assert world.observed().status.rollout is None


def test_first_revision_that_never_served_needs_no_canary() -> None:
    """There is nothing to be measured against, and users wait."""
    world = World(manifest(replicas=1, profiling={"mode": "Skip"}, rollout=CANARY)).settled()
    world.roll_out(ready=False)
    first = world.revision()
    world.change(draftPool=[PLD, EAGLE])
    assert world.revision() != first
    assert (DEPLOYMENT, NAME) not in world.objects


def held_at_the_gate() -> CanaryWorld:
    """A rollout without a canary stopped at its first new pod, which lacks its drafter; then the strategy changes."""
    world = CanaryWorld(rollout={"strategy": "RollingUpdate", "maxSurge": 1})
    old = world.revision()
    world.change(draftPool=[PLD, EAGLE])
    world.add_pod("chat-new", world.deployment()["spec"]["template"])
    world.scale_replica_sets({old: 2, world.revision(): 1})
    world.report(drafters=[DrafterReport(name="pld", loaded=True), DrafterReport(name="eagle", loaded=False)])
    assert world.reasons()[0] == "False/DrafterNotLoaded"
    world.change(rollout=CANARY)
    return world


def test_a_rollout_that_is_held_is_reverted_without_a_canary() -> None:
    """Bug: the pods that serve would have been measured against the one that lacks its drafter."""
    world = held_at_the_gate()
    world.change(draftPool=[PLD])
    assert world.canary is None
    assert world.deployment()["spec"].get("minReadySeconds") is None


def test_a_held_rollout_is_corrected_by_a_measured_draft() -> None:
    """Bug: the correction went out unmeasured. It is measured against the pods that serve, not against the one that
    lacks its drafter, and that one goes."""
    world = held_at_the_gate()
    (stable,) = {revision_of(pod) for pod in world.pods.values()} - {world.revision()}
    world.change(draftPool=[PLD, HEAD])
    assert (world.phase, world.rollout.stable, world.revision()) == ("Starting", stable, stable)
    assert (world.order["stable"], world.order["candidate"]) == (["pld"], ["pld", "eagle"])


def test_a_patch_during_a_promotion_is_measured() -> None:
    """Bug: the promoted revision had no ready pod yet, so the next one rolled out without any measurement."""
    world = under_way()
    stable = world.revision()
    world.measure_arms(1000, GAIN)
    promoted = world.revision()
    assert (world.phase, promoted == stable) == ("Promoting", False)
    world.end_canary()
    world.change(draftPool=[PLD, HEAD])
    assert world.rollout.candidate not in (stable, promoted)
    assert (world.phase, world.rollout.stable, world.revision()) == ("Starting", stable, stable)
    world.start_canary()
    world.measure_arms(1000, LOSS)
    assert (world.phase, world.revision()) == ("Failed", stable)


@pytest.mark.parametrize("is_proven", [False, True])
def test_environment_changed_during_promotion(is_proven: bool) -> None:
    """Pool and environment are measured together until the promoted pool has a ready pod. Then the environment rolls
    out, as any change that leaves the pool alone."""
    world = under_way()
    stable = world.revision()
    world.measure_arms(1000, GAIN)
    promoted = world.revision()
    world.end_canary()
    if is_proven:
        world.add_pod("chat-new", world.deployment()["spec"]["template"])
        world.scale_replica_sets({stable: 2, promoted: 1})
        world.report_states()
    world.settle()
    assert world.phase == "Promoting"
    world.change(engine={"env": [{"name": "A", "value": "b"}]})
    if is_proven:
        assert (world.phase, world.canary) == ("Superseded", None)
        assert world.revision() not in (stable, promoted)
    else:
        assert (world.phase, world.rollout.stable, world.revision()) == ("Starting", stable, stable)
        assert world.rollout.candidate != promoted


def test_a_pool_patched_during_another_rollout_is_measured() -> None:
    """Bug: a changed environment on its way out let any draft through."""
    world = CanaryWorld()
    stable = world.revision()
    world.change(engine={"maxModelLen": 512})
    assert world.revision() != stable
    world.change(draftPool=[PLD, EAGLE])
    assert (world.phase, world.rollout.stable, world.revision()) == ("Starting", stable, stable)


def test_a_pool_without_the_running_ones_record_is_held() -> None:
    """Bug: with the ConfigMap of the running revision gone, any draft rolled out unmeasured."""
    world = CanaryWorld()
    stable = world.revision()
    del world.objects[CONFIG_MAP, f"chat-{stable}"]
    world.change(draftPool=[PLD, EAGLE])
    assert (world.phase, world.rollout.cause, world.rollout.stable) == ("Error", "CannotHostBoth", stable)
    assert f"The ConfigMap of revision {stable}" in world.condition(C.PROGRESSING).message
    assert (world.revision(), world.canary) == (stable, None)
    world.change(draftPool=[PLD])
    assert (CONFIG_MAP, f"chat-{stable}") in world.objects
    world.patched()
    assert (world.phase, world.revision()) == ("Starting", stable)


def test_canary_continues_without_the_stable_revisions_record() -> None:
    """Its pods host both pools whatever became of the ConfigMap; a verdict ends them."""
    world = under_way()
    stable, order = world.revision(), world.order
    del world.objects[CONFIG_MAP, f"chat-{stable}"]
    world.measure_arms(20)
    assert (world.rollout.cause, world.order) == ("CannotHostBoth", order)
    world.measure_arms(1000, LOSS)
    assert (world.phase, world.rollout.cause, world.revision()) == ("Failed", "Worse", stable)
    assert world.canary is None


def test_a_strategy_changed_during_a_rollout_takes_nothing_back() -> None:
    world = CanaryWorld(rollout={"strategy": "RollingUpdate", "maxSurge": 1})
    world.change(draftPool=[PLD, EAGLE])
    candidate = world.revision()
    world.change(rollout=CANARY)
    assert (world.revision(), world.canary) == (candidate, None)


def test_pool_patched_at_zero_replicas_is_measured_with_pods() -> None:
    """Bug avoided: the Deployment took it in while it had no pods, and there was nothing left to compare with."""
    world = CanaryWorld()
    stable = world.revision()
    world.change(replicas=0, draftPool=[PLD, EAGLE])
    assert (world.revision(), world.canary) == (stable, None)
    world.change(replicas=1)
    assert world.revision() == stable
    assert world.phase == "Starting"


def test_a_pool_that_is_patched_while_paused_is_not_taken_in() -> None:
    world = CanaryWorld()
    stable = world.revision()
    world.change(paused=True, draftPool=[PLD, EAGLE])
    assert (world.revision(), world.canary) == (stable, None)


def test_a_candidate_waits_for_a_profile_that_is_required() -> None:
    """A draft of another vocabulary is refused before it takes a node."""
    world = CanaryWorld()
    stable = world.revision()
    world.change(draftPool=[PLD, EAGLE], profiling={"mode": "Required"})
    assert world.reasons() == ("False/WaitingForProfile", "False/WaitingForProfile")
    assert (world.revision(), world.canary) == (stable, None)
    (job,) = world.jobs()
    world.profile(job)
    assert world.phase == "Starting"
