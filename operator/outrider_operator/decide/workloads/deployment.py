"""The Deployment of the serving pods."""

from __future__ import annotations

import math

from outrider_crds.base import seconds

from outrider_operator.decide.intent import Intent
from outrider_operator.decide.ownership import labels, owner_reference, selector
from outrider_operator.decide.revisions import Revision, revision_annotations
from outrider_operator.decide.runtime_image import IMAGE_ANNOTATION, hardware
from outrider_operator.model import DEPLOYMENT, Object, Observed

_HISTORY = 2


def deployment(observed: Observed, intent: Intent, revision: Revision) -> Object:
    """Its replicas are always spec.replicas: autoscalers write those, and nobody writes the Deployment's."""
    rollout = intent.spec.rollout
    kind = hardware(on_cpu=intent.spec.accelerator.on_cpu)
    return {
        "apiVersion": "apps/v1",
        "kind": DEPLOYMENT,
        "metadata": {
            "name": observed.name,
            "namespace": observed.namespace,
            "labels": labels(observed.name),
            "annotations": {
                IMAGE_ANNOTATION: f"{kind} {intent.default_image}",
                **revision_annotations(revision),
            },
            "ownerReferences": [owner_reference(observed, controller=True)],
        },
        "spec": {
            "replicas": intent.spec.replicas,
            "paused": intent.spec.paused,
            "revisionHistoryLimit": _HISTORY,
            "progressDeadlineSeconds": max(1, math.ceil(seconds(rollout.progress_deadline))),
            "selector": {"matchLabels": selector(observed.name)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
            },
            "template": revision.template,
        },
    }
