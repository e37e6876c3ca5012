"""A canary of a service whose other pods do not serve."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C

from tests.unit.operator.decide.canary.canary_world import GAIN, HEAD, LOSS, NAME, CanaryWorld, under_way
from tests.unit.operator.decide.world import EAGLE, PLD, rfc3339


def serving(world: CanaryWorld) -> list[dict[str, Any]]:
    return [pod for name, pod in world.pods.items() if not name.startswith(NAME)]


def end(
    world: CanaryWorld, pod: dict[str, Any], *, ready: bool = False, restarts: int = 1, run_s: float = 60.0
) -> None:
    """The pod's engine died once more, after `run_s`; the container starts again."""
    pod["status"]["conditions"] = [{"type": "Ready", "status": "True" if ready else "False"}]
    (status,) = pod["status"]["containerStatuses"]
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": rfc3339(world.now)}
    ended["startedAt"] = rfc3339(world.now - run_s)
    status.update(restartCount=restarts, started=ready, lastState={"terminated": ended})


def unready(world: CanaryWorld) -> None:
    for pod in serving(world):
        end(world, pod)


@pytest.mark.parametrize("end_of_canary", ["worse", "abort", "patch", "strategy", "another"])
def test_only_ready_pod_stays_after_its_canary(end_of_canary: str) -> None:
    """Bug: the verdict took away the only endpoint, and every request failed until the others had started."""
    world = under_way(replicas=1)
    unready(world)
    world.settle()
    if end_of_canary == "worse":
        world.measure_arms(1000, LOSS)
    elif end_of_canary == "abort":
        world.annotate(abort=world.rollout.candidate)
    elif end_of_canary == "patch":
        world.patch(draftPool=[PLD])
    elif end_of_canary == "strategy":
        world.patch(rollout={"strategy": "RollingUpdate"})
    else:
        world.patch(draftPool=[PLD, HEAD])
    template = world.canary and world.canary["spec"]["template"]
    world.settle()
    assert world.canary is not None
    assert (world.canary["spec"]["replicas"], world.canary["spec"]["template"]) == (1, template)
    assert world.reason(C.READY) == "True/EndpointReady"
    assert world.observed().status.ready_replicas == 1
    if end_of_canary == "worse":
        assert "No other pod is ready: the canary pod answers until one is." in world.rollout.message
    for pod in serving(world):
        end(world, pod, ready=True)
    world.settle()
    assert (world.canary or {"spec": {"replicas": 0}})["spec"]["replicas"] == (end_of_canary == "another")


def test_pods_without_a_ready_one_are_not_said_to_serve() -> None:
    world = under_way(replicas=1)
    world.measure_arms(1000, LOSS)
    assert "The other pods serve on." in world.rollout.message
    world.end_canary()
    unready(world)
    world.settle()
    assert "No pod is ready." in world.rollout.message


def test_fix_of_crashing_pods_rolls_out_unmeasured() -> None:
    """Bug: the canary hosted the drafter that crashed both, and kept the patch that took it away from the pods."""
    world = CanaryWorld(draftPool=[PLD, EAGLE])
    for pod in serving(world):
        end(world, pod, restarts=3)
    world.change(draftPool=[PLD])
    assert (world.phase, world.rollout.cause) == ("Promoting", "NoHealthyBaseline")
    assert world.revision() == world.rollout.candidate
    assert "no pod that should serve is well: Pod chat-" in world.rollout.message
    world.roll_out()
    world.report()
    assert (world.phase, world.canary) == ("Successful", None)


def test_fix_waits_while_a_running_pod_is_well() -> None:
    """One that crashes again and again is not well, even while it is ready."""
    world = CanaryWorld(draftPool=[PLD, EAGLE])
    first, second = serving(world)
    end(world, first, ready=True, restarts=3)
    world.patched(PLD)
    assert world.phase == "Starting"
    end(world, second, ready=True, restarts=3)
    world.settle()
    assert world.phase == "Starting"  # its own pod hosts both pools, and is well
    end(world, world.pods[f"{NAME}-0"], restarts=3)
    world.settle()
    assert (world.phase, world.rollout.cause) == ("Promoting", "NoHealthyBaseline")


@pytest.mark.parametrize("run_s", [86400.0, 601.0, None])
def test_reboot_of_the_node_is_no_crash_of_a_ready_pod(run_s: float | None) -> None:
    """Bug: at the second restart in a pod's life a candidate rolled out unmeasured. The kubelet may lose times."""
    world = CanaryWorld(replicas=1, draftPool=[PLD, EAGLE])
    (pod,) = serving(world)
    end(world, pod, ready=True, restarts=2, run_s=run_s or 0.0)
    if run_s is None:
        pod["status"]["containerStatuses"][0]["lastState"] = {"terminated": {"exitCode": 137}}
    world.now += 420
    world.patched(PLD)
    assert world.phase == "Starting"


def test_candidate_that_takes_away_is_not_judged_by_crashes() -> None:
    world = CanaryWorld(draftPool=[PLD, EAGLE])
    world.patched(PLD)
    for _ in range(4):
        world.processes += 1
        world.measure_arms(10)
    assert world.phase == "Measuring"


def test_pod_that_ends_as_often_as_the_others_is_no_verdict() -> None:
    """Bug: an engine that died for another reason, as in the other pods, was blamed on the candidate. One that ends its
    pod at the first request counts before any has finished."""
    world = CanaryWorld()
    world.patched()
    world.measure_arms(0)
    for restarts in (1, 2):
        end(world, serving(world)[0], ready=True, restarts=restarts)
        world.processes += 1
        world.measure_arms(0)
    assert world.phase == "Measuring"
    for _ in range(2):
        world.processes += 1
        world.measure_arms(0)
    assert (world.phase, world.rollout.cause) == ("Failed", "CandidateCrashed")


def test_old_restarts_of_other_pods_excuse_no_crash() -> None:
    """Bug: one end now of a pod with 30 old ones let a candidate crash 31 times."""
    world = CanaryWorld()
    old, young = serving(world)
    old["status"]["containerStatuses"][0]["restartCount"] = 30
    world.patched()
    world.measure_arms(0)
    end(world, old, ready=True, restarts=31)
    end(world, young, ready=True, restarts=1)
    old["status"]["containerStatuses"].append({"name": "mesh", "restartCount": 9, "started": True})
    for phase in ("Measuring", "Measuring", "Failed"):
        world.processes += 1
        world.measure_arms(0)
        assert world.phase == phase


def test_candidate_whose_own_drafter_is_unused_says_so() -> None:
    """It is not worse, since the loop leaves the drafter out, and takes memory on every pod."""
    world = under_way()
    world.measure_arms(1000, GAIN, draft_length_steps=[10_000, 10_000])
    assert (world.phase, world.rollout.cause, world.rollout.detail) == ("Promoting", "OwnDraftersUnused", "eagle")
    assert "Its own drafters (eagle) were hardly used" in world.rollout.message
