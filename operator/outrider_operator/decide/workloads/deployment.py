"""The Deployment of the serving pods."""

from __future__ import annotations

import math

from outrider_crds.base import seconds
from outrider_crds.spec import Rollout

from outrider_operator.decide.intent import Intent
from outrider_operator.decide.ownership import Children, labels, owner_reference, selector
from outrider_operator.decide.revisions import READY_ANNOTATION, Revision, current_revision_name, revision_annotations
from outrider_operator.decide.rollout_gate import DEADLINE_S, HOLD_S
from outrider_operator.decide.runtime_image import IMAGE_ANNOTATION, hardware
from outrider_operator.inbound.reading import integer
from outrider_operator.model import DEPLOYMENT, Identity, Object

_HISTORY = 2


def deployment(owner: Identity, intent: Intent, revision: Revision) -> Object:
    """Its replicas follow spec.replicas: autoscalers write those, and nothing else writes the Deployment's."""
    kind = hardware(on_cpu=revision.boot.accelerator.on_cpu)
    return {
        "apiVersion": "apps/v1",
        "kind": DEPLOYMENT,
        "metadata": {
            "name": owner.name,
            "namespace": owner.namespace,
            "labels": labels(owner.name),
            "annotations": {
                IMAGE_ANNOTATION: f"{kind} {intent.running_image}",
                **revision_annotations(revision),
                **({READY_ANNOTATION: intent.ready_revision} if intent.ready_revision else {}),
            },
            "ownerReferences": [owner_reference(owner, controller=True)],
        },
        "spec": {
            "replicas": _replicas(intent, revision),
            "paused": intent.spec.paused,
            "revisionHistoryLimit": _HISTORY,
            **_pace(intent.spec.rollout, is_held=intent.gate.is_closed(revision)),
            "selector": {"matchLabels": selector(owner.name)},
            "template": revision.template,
        },
    }


def _replicas(intent: Intent, revision: Revision) -> int:
    return intent.gate.scaled(revision, intent.replicas, _held_surge(intent.spec.rollout))


def _held_surge(rollout: Rollout) -> int:
    """maxSurge at a closed gate, where either that or maxUnavailable is 1. Never both: that lets two new pods through.
    The first new pod takes an old pod's node where `max_unavailable` permits: there may be no node for a surge pod."""
    return 0 if rollout.max_unavailable else 1


def _pace(rollout: Rollout, *, is_held: bool) -> Object:
    """How far a rollout may go; at a closed gate one new pod, which never counts as available (see `rollout_gate`)."""
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


def pods_are_placed(children: Children, intent: Intent) -> bool:
    """False in the moment between a change of the Deployment and its new pods, which are to be scheduled first."""
    if intent.spec.replicas == 0 or intent.running is None:
        return True
    found = children.deployment
    if found is None or current_revision_name(children) != intent.running.name:
        return False
    seen = integer(found, "status", "observedGeneration") == integer(found, "metadata", "generation")
    created, updated = integer(found, "status", "replicas"), integer(found, "status", "updatedReplicas")
    return seen and created >= intent.replicas and updated > 0
