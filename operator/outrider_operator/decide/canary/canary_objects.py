"""The objects of a draft canary: its revision, its hot config, its Deployment."""

from __future__ import annotations

import json
import math

from outrider_crds.base import seconds
from outrider_crds.runtime_config import CONFIG_KEY
from outrider_crds.status import RolloutStatus

from outrider_operator.cluster_model import (
    CANARY_TRACK,
    CONFIG_MAP,
    DEPLOYMENT,
    TRACK_LABEL,
    Object,
    ServiceIdentity,
    canary_hot_map_name,
    canary_name,
    canary_names,
)
from outrider_operator.decide.canary.draft_canary import CanaryRollout
from outrider_operator.decide.canary.record import RECORD_ANNOTATION, record_text
from outrider_operator.decide.drift import needs_apply, stamp
from outrider_operator.decide.outcome import ConcernOutcome
from outrider_operator.decide.ownership import labels, owner_reference, selector
from outrider_operator.decide.revisions import Revision, revision_annotations, revision_map
from outrider_operator.decide.runtime_image import IMAGE_ANNOTATION, hardware
from outrider_operator.validation.reading import name_of


def canary_children(rollout: CanaryRollout) -> ConcernOutcome:
    """Objects that the canary takes now, and those of one that is over."""
    if rollout.is_frozen:
        return ConcernOutcome()
    children, revision = rollout.world.children, rollout.revision
    if revision is None or rollout.hot is None:
        return ConcernOutcome(unwanted=_unwanted(rollout))
    # A pod that is on its way out keeps the arms that it hosts: the stable pool may be another one by now.
    maps = [canary_hot_map(rollout)] if rollout.has_pods else []
    maps += [] if rollout.is_stored else [revision_map(children.owner, revision)]
    stamped = [stamp(document) for document in maps]
    are_applied = not any(needs_apply(children.own(CONFIG_MAP, name_of(document)), document) for document in stamped)
    runs = [stamp(_deployment(rollout, revision))] if children.has_account and are_applied else []
    return ConcernOutcome(objects=(*stamped, *runs))


def _unwanted(rollout: CanaryRollout) -> tuple[Object, ...]:
    """Objects of a canary that is over; what its pods mount goes after them."""
    children = rollout.world.children
    left = (child for key in canary_names(children.owner.name) if (child := children.own(*key)) is not None)
    return tuple(child for child in left if child["kind"] != CONFIG_MAP or not rollout.world.canary_pods.living)


def canary_hot_map(rollout: CanaryRollout) -> Object:
    """The hot config of the canary's pods."""
    hot, owner = rollout.hot.wire() if rollout.hot is not None else {}, rollout.world.children.owner
    return {
        "apiVersion": "v1",
        "kind": CONFIG_MAP,
        "metadata": _metadata(owner, canary_hot_map_name(owner.name)),
        "data": {CONFIG_KEY: json.dumps(hot, indent=1, sort_keys=True)},
    }


def _deployment(rollout: CanaryRollout, revision: Revision) -> Object:
    """Another candidate's pod takes the place of the one before it: there may be no node for two."""
    children, spec, on_cpu = rollout.world.children, rollout.spec, revision.boot.accelerator.on_cpu
    owner = children.owner
    annotations = {
        IMAGE_ANNOTATION: f"{hardware(on_cpu=on_cpu)} {rollout.desired.images.pinned}",
        RECORD_ANNOTATION: record_text(rollout.before or RolloutStatus(), children.canary),
        **revision_annotations(revision),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": DEPLOYMENT,
        "metadata": {**_metadata(owner, canary_name(owner.name)), "annotations": annotations},
        "spec": {
            "replicas": rollout.replicas,
            "paused": spec.paused,
            "revisionHistoryLimit": 0,
            "progressDeadlineSeconds": max(1, math.ceil(seconds(spec.rollout.progress_deadline))),
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {**selector(owner.name), TRACK_LABEL: CANARY_TRACK}},
            "template": revision.template,
        },
    }


def _metadata(owner: ServiceIdentity, name: str) -> Object:
    return {
        "name": name,
        "namespace": owner.namespace,
        "labels": {**labels(owner.name), TRACK_LABEL: CANARY_TRACK},
        "ownerReferences": [owner_reference(owner, controller=True)],
    }
