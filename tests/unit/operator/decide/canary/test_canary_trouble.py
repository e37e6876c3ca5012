"""What keeps a canary from measuring, and what of the candidate's doing fails it."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_crds.runtime_state import CanaryState, DrafterMemory, DrafterReport

from tests.unit.operator.decide.canary.canary_world import CANARY, GAIN, HEAD, LOSS, NAME, CanaryWorld, arm, under_way
from tests.unit.operator.decide.world import EAGLE, PLD, rfc3339, unschedulable


def without(world: CanaryWorld, lacking: str, reason: str = "404 Not Found") -> list[DrafterReport]:
    """Drafters of the canary's pod, of which one is not loaded."""
    return [
        DrafterReport(name=name, loaded=name != lacking, reason=reason * (name == lacking)) for name in world.hosted
    ]


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
    world.unreachable = {f"{NAME}-0": "no answer within 2.0 s"}
    world.measure_arms(20)
    assert (world.phase, world.rollout.cause) == ("Measuring", "")
    world.states.clear()
    world.settle()
    assert world.phase == "Measuring"
    world.now += 41
    world.settle()
    assert (world.phase, world.rollout.cause) == ("Error", "PodsDoNotAnswer")


def test_no_room_for_both_names_what_they_take() -> None:
    world = CanaryWorld()
    world.patched()
    memory = DrafterMemory(weight_bytes=500 << 20, kv_bytes_per_token=0, concurrency_percent=3.0)
    short = "the pool does not fit into memory: 20 MiB are left for KV; eagle takes 900 MiB"
    drafters = [
        DrafterReport(name="pld", loaded=True, memory=memory),
        DrafterReport(name="eagle", loaded=False, reason=short),
    ]
    world.measure_arms(0, drafters=drafters)
    assert (world.phase, world.rollout.cause) == ("Error", "NoRoomForBoth")
    message = world.condition(C.PROGRESSING).message
    assert "eagle takes 900 MiB" in message
    assert "pld with 500 MiB of weights" in message


@pytest.mark.parametrize("lacking", ["pld", "eagle"])
@pytest.mark.parametrize("gain", [GAIN, 0.0, LOSS])
def test_pod_without_room_for_a_drafter_gets_no_verdict(lacking: str, gain: float) -> None:
    """Bug: without its new drafter the candidate drafted as the running pool, and was promoted for being as good."""
    world = CanaryWorld()
    world.patched()
    world.measure_arms(100_000, gain, drafters=without(world, lacking, "CUDA out of memory"))
    assert (world.phase, world.rollout.cause, world.rollout.requests) == ("Error", "NoRoomForBoth", 0)
    world.processes += 1
    world.measure_arms(1000, LOSS)
    assert (world.phase, world.rollout.cause) == ("Failed", "Worse")


def test_a_draft_that_does_not_load_fails() -> None:
    """Bug: "memory" in the name of its model was taken for a lack of memory."""
    world = CanaryWorld()
    world.patched()
    world.measure_arms(0, drafters=without(world, "eagle", "acme/memory-eagle: 404 Not Found"))
    assert (world.phase, world.rollout.cause) == ("Failed", "DrafterNotLoaded")
    assert "acme/memory-eagle: 404 Not Found" in world.condition(C.PROGRESSING).message


def test_shared_drafter_that_does_not_load_is_an_error() -> None:
    """Bug: a drafter of both pools failed the candidate for good, which may be the patch that mends something else."""
    world = CanaryWorld()
    world.patched()
    world.measure_arms(1000, GAIN, drafters=without(world, "pld"))
    assert (world.phase, world.rollout.cause, world.rollout.requests) == ("Error", "StableNotLoaded", 0)
    assert "Mend that drafter, set rollout.onMissingDrafter: Continue, or promote by hand." in world.rollout.message
    world.measure_arms(1000, GAIN)
    assert world.phase == "Promoting"


def test_missing_candidate_is_no_success_under_continue() -> None:
    """Bug: a draft that did not load drafted as the running pool, and was Successful for being as good."""
    world = CanaryWorld(rollout={**CANARY, "onMissingDrafter": "Continue"})
    world.patched()
    world.measure_arms(1000, 0.05, drafters=without(world, "eagle"))
    assert (world.phase, world.rollout.cause) == ("Failed", "DrafterNotLoaded")


def test_pool_that_lacks_a_drafter_is_measured_under_continue() -> None:
    world = CanaryWorld(rollout={**CANARY, "onMissingDrafter": "Continue"})
    world.patched()
    world.measure_arms(1000, GAIN, drafters=without(world, "pld"))
    assert world.phase == "Promoting"


def test_pod_of_previous_candidate_does_not_fail_the_next() -> None:
    """Bug: the pod that was still there lacked the drafter, and the patch that mends it failed for ever."""
    world = CanaryWorld()
    world.patched()
    world.change(paused=True)
    world.measure_arms(0, drafters=without(world, "eagle"))
    assert world.phase == "Starting"
    world.change(paused=False, draftPool=[PLD, HEAD])
    assert (world.phase, world.rollout.cause) == ("Starting", "")
    world.start_canary()
    world.measure_arms(10)
    assert world.phase == "Measuring"


def test_no_capacity_is_an_error_while_it_lasts() -> None:
    world = CanaryWorld()
    world.change(draftPool=[PLD, EAGLE])
    assert world.canary is not None
    pod = world.add_pod(f"{NAME}-0", world.canary["spec"]["template"], ready=False, node=None)
    pod["status"] = unschedulable(CanaryWorld(), "x", world.now)["status"]
    world.now += 61
    world.settle()
    assert (world.phase, world.rollout.cause) == ("Error", "NoCapacity")
    assert "insufficient nvidia.com/gpu" in world.condition(C.PROGRESSING).message
    world.now += 7 * 3600  # longer than the timeout
    world.settle()
    assert (world.phase, world.rollout.cause) == ("Error", "NoCapacity")
    world.start_canary()
    world.measure_arms(10)
    assert world.phase == "Measuring"


GATES = {"schedulingGates": [{"name": "example.com/quota"}]}
INITIAL = {
    "name": "fetch",
    "restartCount": 4,
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
}
LATE = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]


@pytest.mark.parametrize(
    ("pod", "deployment", "said"),
    [
        ({"spec": GATES}, {}, "waits for its scheduling gates to be removed: example.com/quota."),
        (
            {"status": {"initContainerStatuses": [INITIAL]}},
            {},
            "Init container fetch of pod chat-canary-0 cannot start: back-off.",
        ),
        ({}, {"status": {"conditions": LATE}}, "within rollout.progressDeadline (20m). Pod chat-canary-0 is starting."),
    ],
)
def test_pod_that_cannot_run_is_an_error(pod: dict[str, Any], deployment: dict[str, Any], said: str) -> None:
    """Bug: it was Starting, without a word, until the timeout had passed: NoTraffic."""
    world = CanaryWorld()
    world.change(draftPool=[PLD, EAGLE])
    world.start_canary(ready=False)
    canary_pod = world.pods[f"{NAME}-0"]
    for part, fields in pod.items():
        canary_pod[part].update(fields)
    assert world.canary is not None
    world.canary.update(deployment)
    world.now += 61
    world.settle()
    assert (world.phase, world.rollout.cause) == ("Error", "PodCannotStart")
    assert said in world.rollout.message
    world.now += 7 * 3600
    world.settle()
    world.canary.pop("status", None)
    world.start_canary()
    world.measure_arms(10)
    assert world.phase == "Measuring"


def test_time_without_a_ready_pod_is_not_measured() -> None:
    """Bug: a pod that loaded for longer than the timeout was a verdict: NoTraffic."""
    world = CanaryWorld()
    world.change(draftPool=[PLD, EAGLE])
    world.start_canary(ready=False)
    world.now += 7 * 3600
    world.settle()
    assert world.phase == "Starting"
    world.start_canary()
    world.measure_arms(10)
    assert world.phase == "Measuring"
    world.end_canary()
    world.states.clear()
    world.settle()
    world.now += 7 * 3600
    world.settle()
    assert world.phase == "Measuring"


def test_one_failed_poll_of_a_new_pod_is_no_error() -> None:
    """Bug: Stalled=True at once, on which Flux and Argo CD end their wait."""
    world = CanaryWorld()
    world.change(draftPool=[PLD, EAGLE])
    world.now += 600
    world.start_canary()
    ready = world.pods[f"{NAME}-0"]["status"]["conditions"][0]
    ready["lastTransitionTime"] = rfc3339(world.now)
    world.unreachable = {f"{NAME}-0": "no whole answer within 2.0 s"}
    plan = world.settle()
    assert (world.phase, world.reason(C.STALLED)) == ("Starting", "False/NotStalled")
    assert plan.requeue_after_s is not None
    assert plan.requeue_after_s <= 15
    world.now += 41
    world.settle()
    assert (world.phase, world.rollout.cause, world.reason(C.STALLED)) == (
        "Error", "PodsDoNotAnswer", "True/CanaryError",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("forged", "said"),
    [
        ({"plain_s": 9e14, "plain_squared": 9e14}, "more seconds than its age allows"),
        ({"plain_s": 4000.0 * 30, "plain_squared": 1e9}, "a speed-up above 6"),
        ({"plain_squared": 1.0}, "squares below those of equal requests"),
        ({"price_squared": 1.0}, "squares below those of equal requests"),
        ({"plain_times_price": 1e9}, "a correlation above 1"),
        ({"speculated_s": 5000.0}, "more speculated than plain seconds"),
        ({"batch_steps": [230_000]}, "more steps than its tokens allow"),
        ({"batch_steps": [0] * 31 + [9]}, "batches of more than 4096 requests"),
        ({"attained": {"chat": 1001}}, "more requests that met a class than finished"),
    ],
)
def test_sums_that_no_pod_can_have_are_not_judged(forged: dict[str, Any], said: str) -> None:
    """Bug: 9e14 plain seconds of 410 requests promoted the candidate, by +439024390243802.4%."""
    world = under_way()
    stable, candidate = arm(1000, 100.0), arm(1000, 110.0).model_copy(update=forged)
    world.measure_arms(canary=CanaryState(id=world.order["id"], stable=stable, candidate=candidate))
    assert (world.phase, world.rollout.cause, world.rollout.requests) == ("Error", "ImpossibleSums", 10)
    assert f"reports sums that no pod can have: {said}." in world.rollout.message
    world.measure_arms(1000, GAIN)
    assert world.phase == "Promoting"


@pytest.mark.parametrize(("steps", "phase"), [([0, 9, 9], "Promoting"), ([0, 9, 9, 1], "Error")])
def test_batches_above_max_num_seqs_are_not_judged(steps: list[int], phase: str) -> None:
    """Bug: the verdict said "in batches of 2147483648 to 4294967295"."""
    world = under_way(engine={"extraArgs": ["--max-num-seqs=4"]})
    stable, candidate = arm(1000, 100.0), arm(1000, 110.0).model_copy(update={"batch_steps": steps})
    world.measure_arms(canary=CanaryState(id=world.order["id"], stable=stable, candidate=candidate))
    assert world.phase == phase


def test_restarts_before_pod_is_ready_do_not_fail_it() -> None:
    """Bug: two restarts of a starting pod, or of a sidecar, and the candidate's first request failed it for ever."""
    world = CanaryWorld()
    world.patched()
    pod = world.pods[f"{NAME}-0"]
    pod["status"]["containerStatuses"][0]["restartCount"] = 2
    (ready,) = pod["status"]["conditions"]
    for status in ("False", "False", "True", "True"):
        ready["status"] = status
        world.processes += status == "False"
        world.measure_arms(10)
    assert world.phase == "Measuring"


def test_replaced_pod_goes_on_with_the_restarts_before_it() -> None:
    """Bug: under another name each pod might end once more."""
    world = under_way()
    world.processes += 1
    world.measure_arms(0)
    pod = world.pods.pop(f"{NAME}-0")
    world.settle()
    world.pods["chat-canary-9"] = {**pod, "metadata": {**pod["metadata"], "name": "chat-canary-9"}}
    world.measure_arms(0, pod="chat-canary-9")
    assert world.phase == "Measuring"
    world.processes += 1
    world.measure_arms(0, pod="chat-canary-9")
    assert (world.phase, world.rollout.cause) == ("Failed", "CandidateCrashed")


def test_pod_that_ends_for_want_of_memory_says_so() -> None:
    """Bug: it was a verdict about the draft, which may fit in a pod of its own."""
    world = under_way()
    status = world.pods[f"{NAME}-0"]["status"]["containerStatuses"][0]
    status["lastState"] = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    for _ in range(2):
        world.processes += 1
        world.measure_arms(10)
    assert (world.phase, world.rollout.cause) == ("Failed", "NoRoomForBoth")
    assert "was ended for want of memory (OOMKilled). Make room" in world.rollout.message


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


SUFFIX = {"name": "suffix", "method": "Suffix", "suffix": {}}


@pytest.mark.parametrize(
    ("running", "other"),
    [(PLD, {**PLD, "promptLookup": {"maxTokens": 8}}), (SUFFIX, {**SUFFIX, "suffix": {"maxTokens": 8}})],
)
def test_two_lookups_cannot_be_hosted_together(running: dict[str, Any], other: dict[str, Any]) -> None:
    world = CanaryWorld(draftPool=[running])
    world.change(draftPool=[other])
    world.settle()
    assert (world.phase, world.rollout.cause, world.canary) == ("Error", "CannotHostBoth", None)
    world.annotate(promote=world.rollout.candidate)
    world.settle()
    assert world.revision() == world.rollout.candidate
