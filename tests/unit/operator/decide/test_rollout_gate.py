"""A rollout goes beyond its first new pod only once that pod reports every drafter loaded."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_crds.runtime_state import DrafterReport
from outrider_operator.cluster_model import REVISION_LABEL
from outrider_operator.decide.desired.rollout_gate import DEADLINE_S, HOLD_S

from tests.unit.operator.decide.world import EAGLE, PLD, World, manifest, rfc3339

MISSING = [
    DrafterReport(name="pld", loaded=True),
    DrafterReport(name="eagle", loaded=False, reason="org/eagle: 404 Not Found"),
]
ROLLING = {"maxSurge": 3, "progressDeadline": "20m"}


def serving(**spec: Any) -> World:
    """Two pods of a service that was rolled out without a profile."""
    return World(manifest(**{"replicas": 2, "profiling": {"mode": "Skip"}, "rollout": ROLLING, **spec})).served()


def patched(world: World, **spec: Any) -> None:
    """A draft is patched in, and its first pod gets ready."""
    old = world.revision()
    world.change(**(spec or {"draftPool": [PLD, EAGLE]}))
    first_pod(world, old)


def first_pod(world: World, old: str) -> None:
    """What the Deployment's controller does at a closed gate."""
    deployment = world.deployment()
    world.add_pod("chat-new", deployment["spec"]["template"])
    world.scale_replica_sets({old: 2, world.revision(): 1})
    progress = {"type": "Progressing", "status": "True", "lastUpdateTime": rfc3339(world.now)}
    deployment["status"] = {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": 3,
        "updatedReplicas": 1,
        "availableReplicas": 2,
        "conditions": [progress],
    }


def pace(world: World) -> tuple[int, int, int, int]:
    """minReadySeconds, deadline, maxSurge and maxUnavailable of the Deployment."""
    spec = world.deployment()["spec"]
    limits = spec["strategy"]["rollingUpdate"]
    return (
        spec.get("minReadySeconds", 0),
        spec["progressDeadlineSeconds"],
        limits["maxSurge"],
        limits["maxUnavailable"],
    )


OPEN, CLOSED = (0, 1200, 3, 0), (HOLD_S, DEADLINE_S, 1, 0)


def test_a_new_service_has_nothing_to_hold() -> None:
    """All of its pods start at once."""
    world = World(manifest(replicas=3, rollout=ROLLING)).settled()
    assert pace(world) == OPEN


def test_a_new_revision_is_held_from_its_first_moment() -> None:
    """Template and hold are one write: there is no moment at which a ready pod could take an old one's place."""
    world = serving()
    world.change(draftPool=[PLD, EAGLE])
    assert pace(world) == CLOSED


def test_a_draft_that_is_missing_holds_the_rollout() -> None:
    """F2 of the review: a draft that answers 404 replaced a good one on all pods with every condition True."""
    world = serving()
    patched(world)
    world.report(drafters=MISSING)
    assert pace(world) == CLOSED
    for kind in (C.PROGRESSING, C.UPDATED):
        assert world.reason(kind) == "False/DrafterNotLoaded"
        said = world.condition(kind).message
        assert "Pod chat-new: drafter eagle is not loaded: org/eagle: 404 Not Found. The old pods serve on." in said
        assert "onMissingDrafter: Continue" in said
    assert world.reason(C.READY) == "True/EndpointReady"


def test_a_draft_that_is_loaded_opens_the_gate() -> None:
    world = serving()
    patched(world)
    world.settle()
    assert world.reason(C.PROGRESSING) == "True/RollingOut"
    assert "follow once it reports its drafters" in world.condition(C.PROGRESSING).message
    world.report()
    assert pace(world) == OPEN


def test_a_gate_that_was_opened_stays_open() -> None:
    """The pod that proved it is restarted, and its state unknown: the rollout goes on."""
    world = serving()
    patched(world)
    world.report()
    world.states.clear()
    world.settle()
    assert pace(world) == OPEN


def test_a_pod_that_does_not_name_the_drafter_has_not_loaded_it() -> None:
    world = serving()
    patched(world)
    world.report(drafters=MISSING[:1])
    assert pace(world) == CLOSED
    assert "does not report drafter eagle" in world.condition(C.UPDATED).message


def test_the_word_of_an_old_pod_does_not_open_the_gate() -> None:
    """Old pods that had the drafter loaded say nothing about the new revision."""
    world = serving()
    patched(world, engine={"maxModelLen": 512})
    world.report_states()
    del world.states["chat-new"]
    world.settle()
    assert pace(world) == CLOSED


@pytest.mark.parametrize("replicas", [1, 2])
def test_drafter_lost_after_complete_rollout_is_no_rollout(replicas: int) -> None:
    """A pod that restarted in an outage of the hub turned the whole service to DrafterNotLoaded, with advice on its
    rollout, and back."""
    world = serving(replicas=replicas, draftPool=[PLD, EAGLE])
    assert world.reason(C.PROGRESSING) == "False/Complete"
    restarted = min(world.pods)
    ready = world.pods[restarted]["status"]["conditions"][0]
    answer = world.states.pop(restarted)
    ready["status"] = "False"
    world.settle()
    ready["status"] = "True"
    world.states[restarted] = answer.model_copy(update={"drafters": MISSING})
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/Complete"
    assert world.reason(C.UPDATED) == "True/UpToDate"


@pytest.mark.parametrize("is_late", [False, True])
def test_new_service_whose_pods_miss_a_drafter_says_so(is_late: bool) -> None:
    """There is nothing to hold; a report that comes after the rollout is complete counts like one that comes before."""
    world = World(manifest(replicas=2, profiling={"mode": "Skip"}, draftPool=[PLD, EAGLE])).settled()
    world.roll_out()
    if is_late:
        world.settle()
        assert "none has reported its drafters yet" in world.condition(C.PROGRESSING).message
    world.report(drafters=MISSING)
    assert world.reason(C.PROGRESSING) == "False/DrafterNotLoaded"
    assert world.reason(C.UPDATED) == "False/DrafterNotLoaded"


def test_continue_rolls_out_without_the_drafter() -> None:
    world = serving(rollout={**ROLLING, "onMissingDrafter": "Continue"})
    patched(world)
    world.report(drafters=MISSING)
    assert pace(world) == OPEN
    assert world.reason(C.PROGRESSING) == "True/RollingOut"


def test_continue_frees_a_rollout_that_is_held() -> None:
    world = serving()
    patched(world)
    world.report(drafters=MISSING)
    world.change(rollout={**ROLLING, "onMissingDrafter": "Continue"})
    assert pace(world) == OPEN


def test_a_revert_of_a_held_rollout_is_not_held() -> None:
    """The old pods never went: what serves needs no proof."""
    world = serving()
    old = world.revision()
    patched(world)
    world.report(drafters=MISSING)
    world.states.clear()
    world.change(draftPool=[PLD])
    assert world.revision() == old
    assert pace(world) == OPEN


def test_a_second_bad_draft_is_held_again() -> None:
    """A held revision gives way to another one and returns: neither gets through by the other's pods."""
    world = serving()
    patched(world)
    world.report(drafters=MISSING)
    first = world.revision()
    world.change(draftPool=[PLD, EAGLE | {"name": "other"}])
    assert pace(world) == CLOSED
    world.change(draftPool=[PLD, EAGLE])
    assert (world.revision(), pace(world)) == (first, CLOSED)


def test_one_pod_without_surge_has_nothing_to_hold() -> None:
    """The only old pod is gone at maxSurge 0 before the new one starts. The status still says what is missing."""
    world = serving(replicas=1, rollout={"maxSurge": 0, "maxUnavailable": 1})
    world.change(draftPool=[PLD, EAGLE])
    assert pace(world)[2:] == (0, 1)
    world.roll_out()
    world.report(drafters=MISSING)
    assert pace(world) == (0, 1200, 0, 1)
    assert world.reason(C.PROGRESSING) == "False/DrafterNotLoaded"
    assert "old pods" not in world.condition(C.PROGRESSING).message


def test_one_of_two_pods_without_surge_is_held() -> None:
    """maxSurge 0: the first new pod has the place of an old one, and no further one goes."""
    world = serving(rollout={"maxSurge": 0, "maxUnavailable": 2})
    world.change(draftPool=[PLD, EAGLE])
    assert pace(world) == (HOLD_S, DEADLINE_S, 0, 1)


def test_held_rollout_of_full_gpus_frees_one_for_its_first_pod() -> None:
    """maxUnavailable: 1, the remedy of NoCapacity, was overridden at a closed gate: the first new pod stayed
    Pending for ever."""
    world = serving(rollout={"maxUnavailable": 1})
    world.change(draftPool=[PLD, EAGLE])
    assert pace(world) == (HOLD_S, DEADLINE_S, 0, 1)


def test_an_empty_pool_needs_no_proof() -> None:
    world = serving()
    world.change(draftPool=[])
    assert pace(world) == OPEN


def test_a_service_of_an_operator_without_a_gate_goes_on() -> None:
    """The operator is upgraded in the middle of its rollout: nothing is held after the fact."""
    world = serving()
    patched(world)
    spec = world.deployment()["spec"]
    del spec["minReadySeconds"]
    world.scale_replica_sets(dict.fromkeys(revisions(world), 1))
    world.settle()
    assert pace(world) == OPEN


def test_first_pod_that_never_answers_is_stalled_at_the_deadline() -> None:
    """A NetworkPolicy keeps the operator out: Kubernetes watches no deadline while the rollout is held."""
    world = serving()
    patched(world)
    plan = world.settle()
    assert plan.requeue_after_s == pytest.approx(1200)
    world.now += 1200
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    assert "Pod chat-new is ready and does not report its drafters" in world.condition(C.PROGRESSING).message


def test_pods_of_another_deployment_hold_nothing() -> None:
    """A ReplicaSet of another owner that carries the labels: it is not the service's to protect."""
    world = serving()
    for document in world.replica_sets.values():
        document["metadata"]["ownerReferences"] = [{"uid": "another", "controller": True}]
    world.change(draftPool=[PLD, EAGLE])
    assert pace(world) == OPEN


def revisions(world: World) -> set[str]:
    sets = world.replica_sets.values()
    return {document["metadata"]["labels"][REVISION_LABEL] for document in sets}


def deployment_controller(world: World, old: str, unavailable: int) -> None:
    """Kubernetes scales the revisions of a rollout in proportion (GetReplicaSetFraction), the largest gets the rest."""
    deployment = world.deployment()
    sets = {document["metadata"]["labels"][REVISION_LABEL]: document for document in world.replica_sets.values()}
    before, surge = deployment["scaled_from"], 1 - unavailable
    new, last = sets[world.revision()], sets[old]
    allowed = deployment["spec"]["replicas"] + surge
    grown = int(new["spec"]["replicas"] * allowed / (before + surge) + 0.5)
    if allowed > new["spec"]["replicas"] + last["spec"]["replicas"]:
        world.scale_replica_sets({world.revision(): grown, old: allowed - grown})
    deployment["scaled_from"] = deployment["spec"]["replicas"]
    deployment["status"]["observedGeneration"] = deployment["metadata"]["generation"]


@pytest.mark.parametrize(("rollout", "unavailable"), [(ROLLING, 0), ({**ROLLING, "maxUnavailable": 2}, 1)])
def test_scaling_up_at_a_held_rollout_adds_old_pods_alone(rollout: dict[str, Any], unavailable: int) -> None:
    """Bug: Kubernetes scales both revisions in proportion, so that an autoscaler multiplied the unproven one."""
    world = serving(replicas=3, rollout=rollout)
    old = world.revision()
    patched(world)
    world.scale_replica_sets({old: 3 - unavailable, world.revision(): 1})
    world.deployment()["scaled_from"] = 3
    world.patch(replicas=20)
    steps = []
    for _ in range(12):
        world.settle()
        steps.append(world.deployment()["spec"]["replicas"])
        deployment_controller(world, old, unavailable)
        sets = {document["metadata"]["labels"][REVISION_LABEL]: document for document in world.replica_sets.values()}
        assert sets[world.revision()]["spec"]["replicas"] == 1
    assert steps[-1] == 20
    assert steps == sorted(steps)


def test_a_step_waits_until_kubernetes_has_taken_the_one_before() -> None:
    """Two steps that it sees as one are a large one."""
    world = serving(replicas=3)
    patched(world)
    world.change(replicas=20)
    first = world.deployment()["spec"]["replicas"]
    world.settle()
    assert world.deployment()["spec"]["replicas"] == first < 20


def test_an_open_gate_scales_at_once() -> None:
    world = serving(replicas=3)
    world.change(replicas=20)
    assert world.deployment()["spec"]["replicas"] == 20


def test_surge_pod_of_a_held_rollout_is_no_replica() -> None:
    """An autoscaler read 11 of 10, adopted it ("New size: 11"), and went back and forth."""
    world = World(manifest(replicas=10)).served()
    world.deployment()["status"]["replicas"] = 11
    world.reconcile()
    assert world.observed().status.replicas == 10
