"""The LeaderWorkerSet of a target over several nodes: a replica is a group of pods.

The leader of a group is the pod that a Deployment would make. It answers requests and reports; its workers join it.
"""

from __future__ import annotations

from outrider_operator.cluster_model import (
    COMPONENT_LABEL,
    LEADER_WORKER_SET,
    WORKER,
    Object,
    ServiceIdentity,
    groups_name,
)
from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.ownership import labels, owner_reference
from outrider_operator.decide.revisions import READY_ANNOTATION, Revision, revision_annotations
from outrider_operator.decide.rollout_gate import HOLD, HOLD_ANNOTATION, SHRUNK, SHRUNK_ANNOTATION
from outrider_operator.decide.runtime_image import IMAGE_ANNOTATION, hardware
from outrider_operator.validation.reading import items, mapping

_OF_A_LEADER = ("ports", "lifecycle", "startupProbe", "readinessProbe", "livenessProbe")
"""Fields of the runtime container that a worker lacks: it listens to its leader alone, and ends when that is gone."""


def leader_worker_set(owner: ServiceIdentity, desired: DesiredState, revision: Revision) -> Object:
    """The LeaderWorkerSet that runs `revision`. A pod that restarts takes its group along: its ranks are gone."""
    kind = hardware(on_cpu=revision.boot.accelerator.on_cpu)
    is_held = desired.gate.is_closed(revision)
    replicas = _replicas(desired, revision)
    is_shrunk = is_held and desired.gate.shrinks(replicas)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": LEADER_WORKER_SET,
        "metadata": {
            "name": groups_name(owner.name),
            "namespace": owner.namespace,
            "labels": labels(owner.name),
            "annotations": {
                IMAGE_ANNOTATION: f"{kind} {desired.running_image}",
                **revision_annotations(revision),
                **({READY_ANNOTATION: desired.ready_revision} if desired.ready_revision else {}),
                **({HOLD_ANNOTATION: HOLD} if is_held else {}),
                **({SHRUNK_ANNOTATION: SHRUNK} if is_shrunk else {}),
            },
            "ownerReferences": [owner_reference(owner, controller=True)],
        },
        "spec": {
            "replicas": replicas,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": _pace(desired, replicas, is_held=is_held, is_shrunk=is_shrunk),
            },
            "leaderWorkerTemplate": {
                "size": revision.boot.engine.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": revision.template,
                "workerTemplate": worker_template(revision.template),
            },
        },
    }


def worker_template(leader: Object) -> Object:
    """The pod template of a group's workers. It follows from the leader's alone: an upgrade restarts no pod."""
    spec = mapping(leader, "spec")
    runtime, *others = items(spec, "containers")
    bare = {name: value for name, value in runtime.items() if name not in _OF_A_LEADER}
    metadata = mapping(leader, "metadata")
    return {
        "metadata": {**metadata, "labels": {**mapping(metadata, "labels"), COMPONENT_LABEL: WORKER}},
        "spec": {**spec, "containers": [bare, *others]},
    }


def _replicas(desired: DesiredState, revision: Revision) -> int:
    """Groups to have now. A closed gate lets one start next to a Deployment's pods.

    A held rollout does not grow, since new groups would be of the new revision.
    """
    gate = desired.gate
    if not gate.is_closed(revision):
        return desired.replicas
    return min(desired.replicas, gate.replicas if gate.in_groups else 1)


def _pace(desired: DesiredState, replicas: int, *, is_held: bool, is_shrunk: bool) -> Object:
    """Limits of a rollout. Groups below `partition` keep their revision: at a closed gate all but the first new one,
    which takes the place of the last old one if `max_unavailable` allows, else comes on top.

    After a scale-down it comes on top, too: the last old group may be the only one, and nodes are free.
    """
    rollout = desired.spec.rollout
    if desired.spec.paused:
        return {"partition": replicas, "maxSurge": 0, "maxUnavailable": 1}
    if not is_held:
        return {"partition": 0, "maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable}
    if rollout.max_unavailable and not is_shrunk:
        return {"partition": max(0, replicas - 1), "maxSurge": 0, "maxUnavailable": 1}
    return {"partition": replicas, "maxSurge": 1, "maxUnavailable": 0}
