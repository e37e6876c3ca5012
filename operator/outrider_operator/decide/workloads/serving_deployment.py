"""The Deployment of the serving pods."""

from __future__ import annotations

import math

from outrider_crds.base import seconds
from outrider_crds.rollout_settings import Rollout

from outrider_operator.cluster_model import DEPLOYMENT, Object, ServiceIdentity
from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.ownership import Children, labels, owner_reference, selector
from outrider_operator.decide.revisions import READY_ANNOTATION, Revision, current_revision_name, revision_annotations
from outrider_operator.decide.rollout_gate import DEADLINE_S, HOLD_S
from outrider_operator.decide.runtime_image import IMAGE_ANNOTATION, hardware
from outrider_operator.validation.reading import integer

_HISTORY = 2


def deployment(owner: ServiceIdentity, desired: DesiredState, revision: Revision) -> Object:
    """The Deployment that runs `revision`. Its replicas follow spec.replicas, which autoscalers write."""
    kind = hardware(on_cpu=revision.boot.accelerator.on_cpu)
    return {
        "apiVersion": "apps/v1",
        "kind": DEPLOYMENT,
        "metadata": {
            "name": owner.name,
            "namespace": owner.namespace,
            "labels": labels(owner.name),
            "annotations": {
                IMAGE_ANNOTATION: f"{kind} {desired.running_image}",
                **revision_annotations(revision),
                **({READY_ANNOTATION: desired.ready_revision} if desired.ready_revision else {}),
            },
            "ownerReferences": [owner_reference(owner, controller=True)],
        },
        "spec": {
            "replicas": _replicas(desired, revision),
            "paused": desired.spec.paused,
            "revisionHistoryLimit": _HISTORY,
            **_pace(desired.spec.rollout, is_held=desired.gate.is_closed(revision)),
            "selector": {"matchLabels": selector(owner.name)},
            "template": revision.template,
        },
    }


def _replicas(desired: DesiredState, revision: Revision) -> int:
    gate = desired.gate
    if gate.in_groups and gate.is_closed(revision):  # the first pod starts next to the groups that serve
        return min(desired.replicas, 1)
    return gate.scaled(revision, desired.replicas, _held_surge(desired.spec.rollout))


def _held_surge(rollout: Rollout) -> int:
    """maxSurge at a closed gate. Either it or maxUnavailable is 1; both would admit two new pods.

    If `max_unavailable` allows, the first new pod replaces an old one: there may be no node for a surge pod.
    """
    return 0 if rollout.max_unavailable else 1


def _pace(rollout: Rollout, *, is_held: bool) -> Object:
    """Limits of a rollout. At a closed gate it stops after one new pod, which never becomes available
    (see `rollout_gate`)."""
    if not is_held:
        deadline_s = max(1, math.ceil(seconds(rollout.progress_deadline)))
        strategy = _strategy(rollout.max_surge, rollout.max_unavailable)
        return {"progressDeadlineSeconds": deadline_s, "strategy": strategy}
    surge = _held_surge(rollout)
    strategy = _strategy(surge, 1 - surge)
    return {"minReadySeconds": HOLD_S, "progressDeadlineSeconds": DEADLINE_S, "strategy": strategy}


def _strategy(max_surge: int, max_unavailable: int) -> Object:
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": max_surge, "maxUnavailable": max_unavailable},
    }


def pods_are_placed(children: Children, desired: DesiredState) -> bool:
    """False between a change of the Deployment and its new pods, which should be scheduled before Jobs."""
    if desired.spec.replicas == 0 or desired.running is None:
        return True
    current = children.workload
    if current is None or current_revision_name(children) != desired.running.name:
        return False
    is_observed = integer(current, "status", "observedGeneration") == integer(current, "metadata", "generation")
    created, updated = integer(current, "status", "replicas"), integer(current, "status", "updatedReplicas")
    return is_observed and created >= desired.replicas and updated > 0
