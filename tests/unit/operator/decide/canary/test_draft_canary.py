"""A changed pool is measured in a canary pod before it is rolled out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from outrider_crds.state import CanaryState, DrafterMemory, DrafterState
from outrider_crds.status import ConditionType as C
from outrider_operator.decide import decide
from outrider_operator.decide.pods import revision_of
from outrider_operator.model import CONFIG_MAP, DEPLOYMENT, SERVICE_LABEL

from tests.unit.operator.decide.canary.canary_world import CANARY, NAME, CanaryWorld, arm
from tests.unit.operator.decide.world import EAGLE, PLD, World, gpu_node, manifest, unschedulable

HEAD = {"name": "eagle", "method": "Eagle", "eagle": {"model": {"name": "org/another-head"}}}
GAIN, LOSS = 0.1, -0.1


def under_way(**spec: Any) -> CanaryWorld:
    world = CanaryWorld(**spec)
    world.patched()
    world.measure_arms(10)
    return world


def test_a_patched_pool_is_hosted_together_with_the_running_one() -> None:
    world = CanaryWorld()
    stable, pods = world.revision(), set(world.pods)
    world.patch(draftPool=[PLD, EAGLE])
    world.settle()
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
    world.patch(**change)
    world.settle()
    assert world.canary is None
    assert world.observed().status.rollout is None


def test_a_first_revision_that_never_served_is_corrected_without_a_canary() -> None:
    """There is nothing to be measured against, and users wait."""
    world = World(manifest(replicas=1, profiling={"mode": "Skip"}, rollout=CANARY))
    world.settle()
    world.roll_out(ready=False)
    first = world.revision()
    world.patch(draftPool=[PLD, EAGLE])
    world.settle()
    assert world.revision() != first
    assert (DEPLOYMENT, NAME) not in world.objects


def held_at_the_gate() -> CanaryWorld:
    """A rollout without a canary stopped at its first new pod, which lacks its drafter; then the strategy changes."""
    world = CanaryWorld(rollout={"strategy": "RollingUpdate", "maxSurge": 1})
    old = world.revision()
    world.patch(draftPool=[PLD, EAGLE])
    world.settle()
    world.add_pod("chat-new", world.deployment()["spec"]["template"])
    world.scale_replica_sets({old: 2, world.revision(): 1})
    world.report_states(drafters=[DrafterState(name="pld", loaded=True), DrafterState(name="eagle", loaded=False)])
    world.settle()
    assert world.reasons()[0] == "False/DrafterNotLoaded"
    world.patch(rollout=CANARY)
    world.settle()
    return world


def test_a_rollout_that_is_held_is_reverted_without_a_canary() -> None:
    """Bug: the pods that serve would have been measured against the one that lacks its drafter."""
    world = held_at_the_gate()
    world.patch(draftPool=[PLD])
    world.settle()
    assert world.canary is None
    assert world.deployment()["spec"].get("minReadySeconds") is None


def test_a_held_rollout_is_corrected_by_a_measured_draft() -> None:
    """Bug: the correction went out unmeasured. It is measured against the pods that serve, not against the one that
    lacks its drafter, and that one goes."""
    world = held_at_the_gate()
    (stable,) = {revision_of(pod) for pod in world.pods.values()} - {world.revision()}
    world.patch(draftPool=[PLD, HEAD])
    world.settle()
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
    world.patch(draftPool=[PLD, HEAD])
    world.settle()
    assert world.rollout.candidate not in (stable, promoted)
    assert (world.phase, world.rollout.stable, world.revision()) == ("Starting", stable, stable)
    world.start_canary()
    world.measure_arms(1000, LOSS)
    assert (world.phase, world.revision()) == ("Failed", stable)


def test_a_pool_patched_during_another_rollout_is_measured() -> None:
    """Bug: a changed environment on its way out let any draft through."""
    world = CanaryWorld()
    stable = world.revision()
    world.patch(engine={"maxModelLen": 512})
    world.settle()
    assert world.revision() != stable
    world.patch(draftPool=[PLD, EAGLE])
    world.settle()
    assert (world.phase, world.rollout.stable, world.revision()) == ("Starting", stable, stable)


def test_a_pool_without_the_running_ones_record_is_held() -> None:
    """Bug: with the ConfigMap of the running revision gone, any draft rolled out unmeasured."""
    world = CanaryWorld()
    stable = world.revision()
    del world.objects[CONFIG_MAP, f"chat-{stable}"]
    world.patch(draftPool=[PLD, EAGLE])
    world.settle()
    assert (world.phase, world.rollout.cause, world.rollout.stable) == ("Error", "CannotHostBoth", stable)
    assert f"The ConfigMap of revision {stable}" in world.condition(C.PROGRESSING).message
    assert (world.revision(), world.canary) == (stable, None)
    world.patch(draftPool=[PLD])
    world.settle()
    assert (CONFIG_MAP, f"chat-{stable}") in world.objects
    world.patched()
    assert (world.phase, world.revision()) == ("Starting", stable)


def test_a_canary_under_way_goes_on_without_the_stable_ones_record() -> None:
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
    world.patch(draftPool=[PLD, EAGLE])
    world.settle()
    candidate = world.revision()
    world.patch(rollout=CANARY)
    world.settle()
    assert (world.revision(), world.canary) == (candidate, None)


def test_its_pods_get_traffic_and_are_no_replicas() -> None:
    world = under_way()
    assert world.canary is not None
    template, service = world.canary["spec"]["template"], world.objects["Service", "chat"]
    labels = template["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert labels["outrider.dev/track"] == "canary"
    budget = world.objects["PodDisruptionBudget", "chat"]["spec"]["selector"]["matchLabels"]
    assert budget.items() <= labels.items()
    assert world.observed().status.replicas == 2
    assert world.observed().status.ready_replicas == 2
    hot = next(v for v in template["spec"]["volumes"] if v["name"].endswith("hot"))
    assert hot["configMap"]["name"] == f"{NAME}-hot"


def test_a_canary_pod_that_is_not_ready_blocks_no_drain() -> None:
    """Bug avoided: its disruption budget counts the pod, and one that crashes for hours would use up what may go."""
    world = CanaryWorld()
    budget = world.objects["PodDisruptionBudget", "chat"]["spec"]
    world.patch(draftPool=[PLD, EAGLE])
    world.settle()
    assert budget["maxUnavailable"] == 1
    world.start_canary(ready=False)
    world.settle()
    assert world.objects["PodDisruptionBudget", "chat"]["spec"]["maxUnavailable"] == 2
    world.start_canary()
    world.settle()
    assert world.objects["PodDisruptionBudget", "chat"]["spec"]["maxUnavailable"] == 1


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
    world.report_states()
    world.settle()
    assert world.phase == "Successful"
    world.roll_out()
    world.settle()
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
    assert "below the line of -3%" in world.condition(C.PROGRESSING).message
    assert "Gain -10.0% [" in world.condition(C.PROGRESSING).message
    assert world.canary is not None
    assert world.canary["spec"]["replicas"] == 0
    world.end_canary()
    world.now += 100_000
    world.settle()
    assert (world.phase, world.revision()) == ("Failed", stable)
    assert world.reason(C.READY) == "True/EndpointReady"


def test_another_candidate_after_a_failed_one_is_tried_at_once() -> None:
    world = under_way()
    world.measure_arms(1000, LOSS)
    world.end_canary()
    world.patched(PLD, HEAD)
    assert world.phase == "Starting"
    assert world.hosted == ["pld", "eagle"]


def test_a_failed_candidate_is_measured_against_another_stable() -> None:
    """Bug: it stayed failed after another pool had been rolled out without a canary."""
    world = under_way()
    candidate = world.rollout.candidate
    world.measure_arms(1000, LOSS)
    world.end_canary()
    world.patch(draftPool=[PLD, HEAD], rollout={"strategy": "RollingUpdate", "maxSurge": 1})
    world.settle()
    world.roll_out()
    world.settle()
    world.report_states()
    world.settle()
    stable = world.revision()
    world.patch(draftPool=[PLD, EAGLE], rollout=CANARY)
    world.settle()
    assert (world.phase, world.rollout.candidate, world.rollout.stable) == ("Starting", candidate, stable)
    assert world.hosted == ["pld", "eagle", "eagle-was"]


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


def test_the_same_patch_after_a_cancelled_one_is_measured() -> None:
    world = under_way()
    world.patch(draftPool=[PLD])
    world.settle()
    world.end_canary()
    world.patched()
    assert world.phase == "Starting"


def test_scale_and_hot_changes_go_on_with_the_same_canary() -> None:
    world = under_way()
    attempt = world.order["id"]
    world.patch(replicas=5, speculation={"mode": "Off", "maxDraftTokens": 2})
    world.settle()
    assert (world.phase, world.order["id"]) == ("Measuring", attempt)
    assert world.deployment()["spec"]["replicas"] == 5
    assert world.canary_hot().mode == "Off"
    assert world.canary_hot().max_draft_tokens == 2


def test_a_service_at_zero_keeps_the_sums_and_goes_on_later() -> None:
    world = under_way()
    world.measure_arms(50)
    world.patch(replicas=0)
    world.settle()
    assert world.canary is not None
    assert world.canary["spec"]["replicas"] == 0
    world.pods.clear()
    world.states.clear()
    world.settle()
    assert world.rollout.requests == 50
    world.patch(replicas=2)
    world.settle()
    world.roll_out()
    world.processes += 1
    world.start_canary()
    world.measure_arms(30)
    assert (world.phase, world.rollout.requests) == ("Measuring", 80)


def test_a_pool_that_is_patched_at_zero_is_measured_once_there_are_pods() -> None:
    """Bug avoided: the Deployment took it in while it had no pods, and there was nothing left to compare with."""
    world = CanaryWorld()
    stable = world.revision()
    world.patch(replicas=0, draftPool=[PLD, EAGLE])
    world.settle()
    assert (world.revision(), world.canary) == (stable, None)
    world.patch(replicas=1)
    world.settle()
    assert world.revision() == stable
    assert world.phase == "Starting"


def test_a_paused_service_decides_nothing() -> None:
    world = under_way()
    world.patch(paused=True)
    world.settle()
    world.measure_arms(1000, LOSS)
    assert world.phase == "Measuring"
    assert world.reasons()[0] == "False/Paused"
    world.patch(paused=False)
    world.settle()
    assert world.phase == "Failed"


@pytest.mark.parametrize(
    ("change", "back"),
    [
        ({"paused": True}, {"paused": False}),
        ({"replicas": 0}, {"replicas": 2}),
        ({"draftPool": [PLD, {"name": "eagle", "method": "Nonsense"}]}, {"draftPool": [PLD, EAGLE]}),
    ],
)
def test_time_without_decisions_does_not_use_up_the_timeout(change: dict[str, Any], back: dict[str, Any]) -> None:
    """Bug: seven hours of a pause were a verdict at its end: Inconclusive, or a promotion without evidence."""
    world = under_way()
    attempt = world.rollout.started_at
    world.patch(**change)
    world.settle()
    world.now += 7 * 3600
    world.settle()
    world.patch(**back)
    world.settle()
    assert (world.phase, world.rollout.started_at) == ("Measuring", attempt)
    assert 7 * 3600 <= world.rollout.held_seconds <= 7 * 3600 + 60
    world.now += 6 * 3600
    world.settle()
    assert world.phase == "Inconclusive"


def test_a_pool_that_is_patched_while_paused_is_not_taken_in() -> None:
    world = CanaryWorld()
    stable = world.revision()
    world.patch(paused=True, draftPool=[PLD, EAGLE])
    world.settle()
    assert (world.revision(), world.canary) == (stable, None)


def test_a_candidate_waits_for_a_profile_that_is_required() -> None:
    """A draft of another vocabulary is refused before it takes a node."""
    world = CanaryWorld()
    stable = world.revision()
    world.patch(draftPool=[PLD, EAGLE], profiling={"mode": "Required"})
    world.settle()
    assert world.reasons() == ("False/WaitingForProfile", "False/WaitingForProfile")
    assert (world.revision(), world.canary) == (stable, None)
    (job,) = world.jobs()
    world.measure(job)
    world.settle()
    assert world.phase == "Starting"


def test_a_restarted_pod_loses_no_requests() -> None:
    world = under_way()
    world.measure_arms(60)
    world.processes += 1
    world.measure_arms(5)
    assert world.rollout.requests == 65


def test_a_replaced_pod_loses_no_requests() -> None:
    world = under_way()
    world.measure_arms(60)
    pod = world.pods.pop(f"{NAME}-0")
    world.settle()
    assert world.rollout.requests == 60
    world.pods["chat-canary-9"] = {**pod, "metadata": {**pod["metadata"], "name": "chat-canary-9"}}
    world.measure_arms(5, pod="chat-canary-9")
    assert world.rollout.requests == 65


def test_an_operator_that_lost_the_status_goes_on_from_the_deployment() -> None:
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


def test_an_operator_that_lost_the_deployment_goes_on_from_the_status() -> None:
    world = under_way()
    world.measure_arms(100)
    del world.objects[DEPLOYMENT, NAME]
    world.end_canary()
    world.settle()
    world.processes += 1
    world.start_canary()
    world.measure_arms(20)
    assert (world.phase, world.rollout.requests) == ("Measuring", 120)


def test_sums_of_another_attempt_do_not_count() -> None:
    """A retry has another id, and a pod reports the old one until it has read that."""
    world = under_way()
    world.measure_arms(1000, LOSS)
    world.annotate(retry=world.rollout.candidate)
    world.now += 60
    state = world.states[f"{NAME}-0"]
    world.settle()
    assert world.phase == "Starting"
    assert state.canary is not None
    assert world.order["id"] != state.canary.id
    world.start_canary()
    world.settle()
    assert (world.phase, world.rollout.sums) == ("Starting", [])


@pytest.mark.parametrize(
    ("order", "phase", "cause"), [("promote", "Promoting", ""), ("abort", "Failed", "AbortedByHand")]
)
def test_a_human_decides_by_an_annotation(order: str, phase: str, cause: str) -> None:
    world = under_way()
    world.annotate(**{order: world.rollout.candidate})
    world.settle()
    assert (world.phase, world.rollout.cause) == (phase, cause)


def test_an_annotation_that_names_no_revision_is_an_event_and_nothing_else() -> None:
    world = under_way()
    before = world.rollout
    world.annotate(promote="8a1e43c8ca")
    plan = world.reconcile()
    (event,) = [event for event in plan.events if event.reason == "CanaryOrderIgnored"]
    assert "promote=8a1e43c8ca names no revision" in event.message
    assert world.rollout.model_copy(update={"ignored": [], "message": before.message}) == before
    assert world.reconcile().events == ()


def test_an_annotation_without_any_canary_is_an_event() -> None:
    world = CanaryWorld()
    world.annotate(abort="nonsense")
    assert [event.reason for event in world.reconcile().events] == ["CanaryOrderIgnored"]
    assert world.settle().events == ()


def test_a_runtime_without_the_field_is_an_error() -> None:
    world = under_way()
    world.now += 100
    world.measure_arms(canary=None)
    assert (world.phase, world.rollout.cause) == ("Error", "RuntimeTooOld")
    assert world.reasons() == ("False/CanaryError", "False/CanaryError")
    world.measure_arms(20)
    assert world.phase == "Measuring"


def test_a_pod_that_refuses_its_orders_is_an_error_in_its_words() -> None:
    world = under_way()
    world.measure_arms(canary=None, config_error="canary.stable names no drafter of the pool", config_hash="before")
    assert (world.phase, world.rollout.cause) == ("Error", "PodsDoNotAnswer")
    assert "canary.stable names no drafter of the pool" in world.condition(C.PROGRESSING).message


def test_lost_poll_of_measuring_pod_is_no_error() -> None:
    """The pod's last state still counts, so that a slow network makes no Warning event."""
    world = under_way()
    world.unheard = {f"{NAME}-0": "no answer within 2.0 s"}
    world.measure_arms(20)
    assert (world.phase, world.rollout.cause) == ("Measuring", "")
    world.states.clear()
    world.settle()
    assert (world.phase, world.rollout.cause) == ("Error", "PodsDoNotAnswer")


def test_no_room_for_both_names_what_they_take() -> None:
    world = CanaryWorld()
    world.patched()
    memory = DrafterMemory(weight_bytes=500 << 20, kv_bytes_per_token=0, concurrency_percent=3.0)
    short = "the pool does not fit into memory: 20 MiB are left for KV; eagle takes 900 MiB"
    drafters = [
        DrafterState(name="pld", loaded=True, memory=memory),
        DrafterState(name="eagle", loaded=False, reason=short),
    ]
    world.measure_arms(0, drafters=drafters)
    assert (world.phase, world.rollout.cause) == ("Error", "NoRoomForBoth")
    message = world.condition(C.PROGRESSING).message
    assert "eagle takes 900 MiB" in message
    assert "pld with 500 MiB of weights" in message


def test_a_draft_that_does_not_load_fails() -> None:
    world = CanaryWorld()
    world.patched()
    drafters = [
        DrafterState(name="pld", loaded=True),
        DrafterState(name="eagle", loaded=False, reason="org/eagle: 404 Not Found"),
    ]
    world.measure_arms(0, drafters=drafters)
    assert (world.phase, world.rollout.cause) == ("Failed", "DrafterNotLoaded")
    assert "org/eagle: 404 Not Found" in world.condition(C.PROGRESSING).message


def test_pod_of_previous_candidate_does_not_fail_the_next() -> None:
    """Bug: the pod that was still there lacked the drafter, and the patch that mends it failed for ever."""
    world = CanaryWorld()
    world.patched()
    world.patch(paused=True)
    world.settle()
    lacking = [DrafterState(name="pld", loaded=True), DrafterState(name="eagle", loaded=False, reason="404 Not Found")]
    world.measure_arms(0, drafters=lacking)
    assert world.phase == "Starting"
    world.patch(paused=False, draftPool=[PLD, HEAD])
    world.settle()
    assert (world.phase, world.rollout.cause) == ("Starting", "")
    world.start_canary()
    world.measure_arms(10)
    assert world.phase == "Measuring"


def test_no_capacity_is_an_error_while_it_lasts() -> None:
    world = CanaryWorld()
    world.patch(draftPool=[PLD, EAGLE])
    world.settle()
    assert world.canary is not None
    pod = world.add_pod(f"{NAME}-0", world.canary["spec"]["template"], ready=False, node=None)
    pod["status"] = unschedulable(CanaryWorld(), "x", world.now)["status"]
    world.now += 61
    world.settle()
    assert (world.phase, world.rollout.cause) == ("Error", "NoCapacity")
    assert "insufficient nvidia.com/gpu" in world.condition(C.PROGRESSING).message
    world.start_canary()
    world.measure_arms(10)
    assert world.phase == "Measuring"


def test_a_pod_that_keeps_ending_while_the_candidate_runs_fails_it() -> None:
    world = under_way()
    phases = []
    for _ in range(2):
        world.processes += 1
        world.measure_arms(10)
        phases.append((world.phase, world.rollout.cause))
    assert phases == [("Measuring", ""), ("Failed", "CandidateCrashed")]


def test_restarts_before_candidate_runs_do_not_fail_it() -> None:
    """Bug: two restarts of a starting pod, or of a sidecar, and the candidate's first request failed it for ever."""
    world = CanaryWorld()
    world.patched()
    world.pods[f"{NAME}-0"]["status"]["containerStatuses"][0]["restartCount"] = 2
    for requests in (0, 0, 10, 20):
        world.processes += requests == 0
        world.measure_arms(requests)
    assert world.phase == "Measuring"


def test_one_restart_of_each_pod_does_not_fail_candidate() -> None:
    """Bug: restarts added up over pods, as after the fault of a network that all of them wait for."""
    world = under_way(rollout={**CANARY, "canary": {"pods": 2}})
    for requests in (10, 20):
        for pod in (f"{NAME}-0", f"{NAME}-1"):
            world.measure_arms(requests, pod=pod)
        world.processes += 1
    assert [entry.restarts for entry in world.rollout.sums if entry.pod] == [1, 1]
    assert world.phase == "Measuring"


@pytest.mark.parametrize("suffix", ["-canary", "-canary-hot", "c"])
def test_refused_object_of_canary_is_an_error(suffix: str) -> None:
    """Bug: a quota on ConfigMaps left it Starting until the timeout, which said that there was no traffic."""
    world = CanaryWorld()
    world.patch(draftPool=[PLD, EAGLE])
    world.refuse(lambda document: document["metadata"]["name"].endswith(suffix), "exceeded quota: maps")
    world.settle()
    assert (world.phase, world.rollout.cause) == ("Error", "PodCannotStart")
    assert "exceeded quota: maps" in world.condition(C.PROGRESSING).message
    world.accept()
    world.settle()
    assert world.phase == "Starting"


def test_two_lookups_cannot_be_hosted_together() -> None:
    world = CanaryWorld()
    world.patch(draftPool=[{**PLD, "promptLookup": {"maxTokens": 8}}])
    world.settle()
    assert (world.phase, world.rollout.cause, world.canary) == ("Error", "CannotHostBoth", None)
    world.annotate(promote=world.rollout.candidate)
    world.settle()
    assert world.revision() == world.rollout.candidate


def test_no_traffic_is_inconclusive_and_holds() -> None:
    world = under_way()
    stable = world.revision()
    world.now += 6 * 3600
    world.settle()
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


def test_another_strategy_rolls_out_at_once() -> None:
    world = under_way()
    world.patch(rollout={"strategy": "RollingUpdate"})
    world.settle()
    assert (world.phase, world.canary, world.revision()) == ("Cancelled", None, world.rollout.candidate)


def test_a_way_back_is_not_measured() -> None:
    world = under_way()
    stable = world.revision()
    world.measure_arms(1000, GAIN)
    world.end_canary()
    world.roll_out()
    world.settle()
    assert world.phase == "Successful"
    world.patch(draftPool=[PLD])
    world.settle()
    assert world.revision() == stable


def test_a_newer_release_is_left_alone() -> None:
    """The operator is rolled back in the midst of a canary."""
    world = under_way()
    world.services["chat"]["status"]["rollout"]["phase"] = "Shadowing"
    before, stable = json.dumps(world.canary), world.revision()
    world.measure_arms(1000, GAIN)
    assert (world.phase, json.dumps(world.canary), world.revision()) == ("Shadowing", before, stable)


def test_where_no_pod_may_be_added_one_makes_room_but_never_the_last() -> None:
    rollout = {**CANARY, "maxSurge": 0, "maxUnavailable": 1}
    world = under_way(rollout=rollout)
    assert world.deployment()["spec"]["replicas"] == 1
    single = under_way(rollout=rollout, replicas=1)
    assert single.deployment()["spec"]["replicas"] == 1


def test_each_product_in_use_has_its_pod_and_none_may_lose() -> None:
    nodes = (gpu_node("a", "H200"), gpu_node("b", "L4"))
    world = CanaryWorld(nodes, accelerator={"products": ["H200", "L4", "A100"]})
    for pod, node in zip(world.pods.values(), nodes, strict=True):
        pod["spec"]["nodeName"] = node.name
        pod["metadata"]["annotations"]["outrider.dev/product"] = node.labels["nvidia.com/gpu.product"]
    world.patched()
    assert world.canary is not None
    assert world.canary["spec"]["replicas"] == 2
    (spread,) = world.canary["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["labelSelector"]["matchLabels"][SERVICE_LABEL]) == (
        "nvidia.com/gpu.product",
        "chat",
    )
    world.measure_arms(1000, GAIN, product="H200")
    assert [(entry.product, entry.measured) for entry in world.rollout.products] == [
        ("H200", True),
        ("L4", False),
        ("A100", False),
    ]
    world.measure_arms(1000, LOSS, pod=f"{NAME}-1", product="L4")
    assert (world.phase, world.rollout.cause) == ("Failed", "Worse")


def test_a_runtime_upgrade_waits_for_the_end() -> None:
    world = under_way()
    candidate = world.rollout.candidate
    world.settings = type(world.settings)(
        runtime_image="outrider/runtime:2", runtime_cpu_image="outrider/runtime-cpu:2", runtime_upgrade_percent=100
    )
    world.settle()
    assert (world.phase, world.rollout.candidate) == ("Measuring", candidate)


def test_other_changes_wait_while_a_failed_pool_is_in_the_spec() -> None:
    """docs/how-to/roll-out-a-draft.md promises both."""
    world = under_way()
    stable = world.revision()
    world.measure_arms(1000, LOSS)
    world.end_canary()
    world.settings = type(world.settings)(
        runtime_image="outrider/runtime:2", runtime_cpu_image="outrider/runtime-cpu:2", runtime_upgrade_percent=100
    )
    world.settle()
    assert (world.phase, world.revision()) == ("Failed", stable)
    world.patch(engine={"maxModelLen": 512})
    world.settle()
    assert (world.phase, world.revision()) == ("Starting", stable)
    world.patch(draftPool=[PLD])
    world.settle()
    template = world.deployment()["spec"]["template"]["spec"]
    assert world.revision() != stable
    assert template["containers"][0]["image"] == "outrider/runtime-cpu:2"


def test_a_class_that_is_met_less_often_fails_it() -> None:
    world = under_way()
    stable, candidate = arm(2000, 100.0), arm(2000, 110.0).model_copy(update={"attained": {"chat": 1600}})
    world.measure_arms(canary=CanaryState(id=world.order["id"], stable=stable, candidate=candidate))
    assert (world.phase, world.rollout.cause) == ("Failed", "SLOLowered")
    assert "SLO class chat" in world.rollout.message


def test_doublings_of_the_requests_are_events() -> None:
    world = under_way()
    reasons = []
    for requests in (60, 70, 120, 140):
        world.now += 1
        arms = {"stable": arm(requests, 100.0), "candidate": arm(requests, 100.0)}
        canary = CanaryState(id=world.order["id"], **arms)
        world.states[f"{NAME}-0"] = world.states[f"{NAME}-0"].model_copy(update={"canary": canary})
        reasons.append([event.reason for event in world.reconcile().events])
    assert reasons == [[], ["CanaryMeasuring"], [], ["CanaryMeasuring"]]


def test_the_message_says_how_much_longer_it_takes() -> None:
    world = under_way()
    world.now += 600
    world.measure_arms(600, 0.0)
    assert (
        "600 requests of each arm. At this traffic (60 requests of each arm a minute) about " in world.rollout.message
    )
    assert world.rollout.message.endswith(" minutes more.")


def test_it_does_not_write_while_nothing_changes() -> None:
    world = under_way()
    plan = world.settle()
    assert plan.is_idle
    assert plan.events == ()
