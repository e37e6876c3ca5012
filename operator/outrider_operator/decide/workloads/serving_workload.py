"""The object that makes the serving pods: a Deployment, or a LeaderWorkerSet for a target over several nodes."""

from __future__ import annotations

from dataclasses import replace

from outrider_operator.cluster_model import DEPLOYMENT, LEADER_WORKER_SET, Object, ServiceIdentity
from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.ownership import Children
from outrider_operator.decide.revisions import Revision, revision_in
from outrider_operator.decide.runtime_image import IMAGE_ANNOTATION
from outrider_operator.decide.workloads.leader_worker_set import leader_worker_set
from outrider_operator.decide.workloads.serving_deployment import deployment
from outrider_operator.validation.reading import annotation, integer


def workload(owner: ServiceIdentity, desired: DesiredState, revision: Revision) -> Object:
    """The object that runs `revision`."""
    make = leader_worker_set if _kind(revision) == LEADER_WORKER_SET else deployment
    return make(owner, desired, revision)


def waits_to_change_kind(children: Children, desired: DesiredState, revision: Revision) -> bool:
    """Is the service paused before the first pod of the kind that `revision` needs?"""
    kinds = {present["kind"] for present in children.workloads}
    return desired.spec.paused and bool(kinds) and _kind(revision) not in kinds


def predecessors(children: Children, desired: DesiredState) -> list[Object]:
    """The workload of the other kind at the scale of `desired`, while its pods serve for a new kind that must wait."""
    revision = desired.running
    if revision is None or not (desired.spec.paused or desired.gate.is_closed(revision)):
        return []
    others = [other for other in children.workloads if other["kind"] != _kind(revision)]
    stored = {revision.name: revision for revision in desired.stored}
    return [
        _scaled(children.owner, desired, other, stored[name])
        for other in others
        if (name := revision_in(other)) in stored
    ]


def _scaled(owner: ServiceIdentity, desired: DesiredState, present: Object, revision: Revision) -> Object:
    """`present`, which runs `revision`, with the replicas of `desired`. It keeps the image that it was made with."""
    made = workload(owner, replace(desired, gate=desired.gate.of(present)), revision)
    image = {IMAGE_ANNOTATION: annotation(present, IMAGE_ANNOTATION)}
    metadata = made["metadata"]
    return {**made, "metadata": {**metadata, "annotations": {**metadata["annotations"], **image}}}


def superseded(children: Children, desired: DesiredState) -> list[Object]:
    """The workload of the other kind, once as many replicas of `desired` are ready: engine.nodes was changed."""
    current, revision = children.workload, desired.running
    others = [other for other in children.workloads if other["kind"] != (current or {}).get("kind")]
    if desired.spec.paused or current is None or revision is None or revision_in(current) != revision.name:
        return []
    is_open = not desired.gate.is_closed(revision) and integer(current, "spec", "replicas") == desired.replicas
    is_observed = integer(current, "status", "observedGeneration") >= integer(current, "metadata", "generation")
    is_enough = integer(current, "status", "availableReplicas") >= desired.replicas
    return others if is_open and is_observed and is_enough else []


def _kind(revision: Revision) -> str:
    return LEADER_WORKER_SET if revision.boot.engine.nodes > 1 else DEPLOYMENT
