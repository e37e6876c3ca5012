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
from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.drift import needs_apply, stamp
from outrider_operator.decide.outcome import Outcome
from outrider_operator.decide.ownership import Children, labels, owner_reference, selector
from outrider_operator.decide.revisions import Revision, revision_annotations, revision_map
from outrider_operator.decide.runtime_image import IMAGE_ANNOTATION, hardware


def canary_children(children: Children, desired: DesiredState, rollout: CanaryRollout) -> Outcome:
    """Objects that the canary takes now, and those of one that is over."""
    if rollout.is_frozen:
        return Outcome()
    if rollout.revision is None or rollout.hot is None:
        return Outcome(unwanted=_unwanted(children, rollout))
    owner, revision = children.owner, rollout.revision
    # A pod that is on its way out keeps the arms that it hosts: the stable pool may be another one by now.
    maps = [stamp(canary_hot_map(owner, rollout))] if rollout.has_pods else []
    if not rollout.is_stored:
        maps.append(stamp(revision_map(owner, revision)))
    account = children.has_account
    is_mountable = account and not any(
        needs_apply(children.own(CONFIG_MAP, _name(document)), document) for document in maps
    )
    runs = [stamp(_deployment(owner, children.canary, desired, rollout, revision))] if is_mountable else []
    return Outcome(objects=(*maps, *runs))


def _unwanted(children: Children, rollout: CanaryRollout) -> tuple[Object, ...]:
    """Objects of a canary that is over; what its pods mount goes after them."""
    present = (children.own(*key) for key in canary_names(children.owner.name))
    left = (child for child in present if child is not None)
    return tuple(child for child in left if child["kind"] != CONFIG_MAP or not rollout.has_pods_left)


def canary_hot_map(owner: ServiceIdentity, rollout: CanaryRollout) -> Object:
    """The hot config of the canary's pods."""
    hot = rollout.hot.wire() if rollout.hot is not None else {}
    return {
        "apiVersion": "v1",
        "kind": CONFIG_MAP,
        "metadata": _metadata(owner, canary_hot_map_name(owner.name)),
        "data": {CONFIG_KEY: json.dumps(hot, indent=1, sort_keys=True)},
    }


def _deployment(
    owner: ServiceIdentity, present: Object | None, desired: DesiredState, rollout: CanaryRollout, revision: Revision
) -> Object:
    """Another candidate's pod takes the place of the one before it: there may be no node for two."""
    on_cpu = revision.boot.accelerator.on_cpu
    annotations = {
        IMAGE_ANNOTATION: f"{hardware(on_cpu=on_cpu)} {desired.images.pinned}",
        RECORD_ANNOTATION: record_text(rollout.status or RolloutStatus(), present),
        **revision_annotations(revision),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": DEPLOYMENT,
        "metadata": {**_metadata(owner, canary_name(owner.name)), "annotations": annotations},
        "spec": {
            "replicas": rollout.replicas,
            "paused": desired.spec.paused,
            "revisionHistoryLimit": 0,
            "progressDeadlineSeconds": max(1, math.ceil(seconds(desired.spec.rollout.progress_deadline))),
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


def _name(document: Object) -> str:
    return str(document["metadata"]["name"])
