"""The concern of the draft canary: its objects, conditions and events, and status.rollout."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

from outrider_crds.base import seconds
from outrider_crds.conditions import ConditionReason
from outrider_crds.rollout_status import RolloutStatus
from outrider_crds.runtime_config import CONFIG_KEY
from outrider_crds.status import SpeculativeServiceStatus

from outrider_operator.cluster_model import (
    CANARY_TRACK,
    CONFIG_MAP,
    DEPLOYMENT,
    TRACK_LABEL,
    Object,
    canary_hot_map_name,
    canary_name,
    canary_names,
)
from outrider_operator.decide.canary.draft_canary import CanaryRollout
from outrider_operator.decide.canary.record import RECORD_ANNOTATION, CanaryPhase, is_foreign, record_text
from outrider_operator.decide.canary.summary import message_of, rollout_status
from outrider_operator.decide.desired.desired_state import IMAGE_ANNOTATION, hardware
from outrider_operator.decide.desired.revisions import Revision, revision_annotations, revision_map
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.drift import needs_apply, stamp
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import ConcernOutcome, Verdict, false, true
from outrider_operator.decide.ownership import child_document, selector
from outrider_operator.plan import Event
from outrider_operator.validation.reading import cut, name_of

_LEAST_DOUBLED = 64
"""Number of requests from which each doubling is an event."""
_MOST_IGNORED = 8
_PROGRESSING: Mapping[str, tuple[bool, ConditionReason]] = {
    CanaryPhase.STARTING: (True, ConditionReason.CANARY_STARTING),
    CanaryPhase.MEASURING: (True, ConditionReason.CANARY_MEASURING),
    CanaryPhase.PROMOTING: (True, ConditionReason.ROLLING_OUT),
    CanaryPhase.FAILED: (False, ConditionReason.CANARY_FAILED),
    CanaryPhase.ERROR: (False, ConditionReason.CANARY_ERROR),
    CanaryPhase.INCONCLUSIVE: (False, ConditionReason.CANARY_INCONCLUSIVE),
}
_TRACK = {TRACK_LABEL: CANARY_TRACK}
_RUNNING = (ConditionReason.CANARY_STARTING, ConditionReason.CANARY_MEASURING)
_EVENTS = {
    CanaryPhase.STARTING: (False, "CanaryStarted"),
    CanaryPhase.SUCCESSFUL: (False, "CanarySuccessful"),
    CanaryPhase.PROMOTING: (False, "CanaryPromoting"),
    CanaryPhase.CANCELLED: (False, "CanaryCancelled"),
    CanaryPhase.FAILED: (True, "CanaryFailed"),
    CanaryPhase.ERROR: (True, "CanaryError"),
    CanaryPhase.INCONCLUSIVE: (True, "CanaryInconclusive"),
}


def draft_canary(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """Objects and status of the canary. A refused spec changes no object of it."""
    canary = intent.canary
    objects = canary_children(canary) if intent.problem is None else ConcernOutcome()
    status = canary_status(canary, world.observed.status.rollout, world.observed.generation)
    return replace(objects, status={"rollout": status}, wake_after_s=canary.next_look_s)


def canary_progressing(canary: CanaryRollout) -> Verdict | None:
    """Verdict of Progressing while a canary holds the rollout; None if none does."""
    if not canary.holds or (canary.waits_for_profile and canary.decided.canary is None):
        return None
    decided = canary.decided.canary
    if decided is None or decided.phase not in _PROGRESSING:
        return true(ConditionReason.CANARY_STARTING, "The changed draftPool is measured once pods may be made.")
    is_moving, reason = _PROGRESSING[decided.phase]
    message = message_of(canary, decided)
    return true(reason, message) if is_moving else false(reason, message)


def canary_updated(canary: CanaryRollout) -> Verdict | None:
    """Verdict of Updated while a canary holds the rollout; None if none does."""
    verdict = canary_progressing(canary)
    if verdict is None:
        return None
    if verdict.reason in _RUNNING:
        return false(
            ConditionReason.CANARY_RUNNING, "The draftPool of the spec is measured in a canary pod; see status.rollout."
        )
    return false(verdict.reason, verdict.message)


def canary_status(canary: CanaryRollout, last: RolloutStatus | None, generation: int) -> RolloutStatus | None:
    """Field status.rollout. A phase of a newer release is left as it is."""
    if is_foreign(canary.canary):
        return last
    before = last or RolloutStatus()
    new = [order for order in canary.decided.unknown_orders if order not in (*before.ignored, *before.obeyed)]
    return rollout_status(canary, generation, tuple([*before.ignored, *new][-_MOST_IGNORED:]))


def canary_events(
    old: SpeculativeServiceStatus, new: SpeculativeServiceStatus, canary: CanaryRollout
) -> tuple[Event, ...]:
    """Events for each change of the phase, each doubling of the requests, and each annotation that is ignored."""
    before, after = old.rollout or RolloutStatus(), new.rollout or RolloutStatus()
    events = [_ignored(order, after) for order in after.ignored if order not in before.ignored]
    if canary.decided.ended is not None and canary.decided.canary is not None:
        events.append(Event(warning=False, reason="CanarySuperseded", message=_superseded(before, after)))
    is_new = (before.phase, before.candidate, before.started_at) != (after.phase, after.candidate, after.started_at)
    if is_new and after.phase in _EVENTS:
        warning, reason = _EVENTS[CanaryPhase(after.phase)]
        events.append(Event(warning=warning, reason=reason, message=after.message))
    elif after.phase == CanaryPhase.MEASURING and _has_doubled(before.requests, after.requests):
        events.append(Event(warning=False, reason="CanaryMeasuring", message=after.message))
    return tuple(events)


def _has_doubled(before: int, after: int) -> bool:
    return after >= _LEAST_DOUBLED and after.bit_length() > before.bit_length()


def _ignored(order: str, rollout: RolloutStatus) -> Event:
    revisions = " and ".join(name for name in (rollout.candidate, rollout.stable) if name) or "none"
    message = f"Annotation outrider.dev/{order} names no revision of the rollout ({revisions}) and does nothing."
    return Event(warning=True, reason="CanaryOrderIgnored", message=cut(message, 1024))


def _superseded(before: RolloutStatus, after: RolloutStatus) -> str:
    return f"Candidate {after.candidate} takes the place of {before.candidate}, which had no verdict yet."


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
    data = {CONFIG_KEY: json.dumps(hot, indent=1, sort_keys=True)}
    return child_document(owner, CONFIG_MAP, canary_hot_map_name(owner.name), more_labels=_TRACK, data=data)


def _deployment(rollout: CanaryRollout, revision: Revision) -> Object:
    """Another candidate's pod takes the place of the one before it: there may be no node for two."""
    children, spec, on_cpu = rollout.world.children, rollout.spec, revision.boot.accelerator.on_cpu
    owner = children.owner
    annotations = {
        IMAGE_ANNOTATION: f"{hardware(on_cpu=on_cpu)} {rollout.desired.images.pinned}",
        RECORD_ANNOTATION: record_text(rollout.before or RolloutStatus(), children.canary),
        **revision_annotations(revision),
    }
    made = {
        "replicas": rollout.replicas,
        "paused": spec.paused,
        "revisionHistoryLimit": 0,
        "progressDeadlineSeconds": max(1, math.ceil(seconds(spec.rollout.progress_deadline))),
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": {**selector(owner.name), **_TRACK}},
        "template": revision.template,
    }
    name = canary_name(owner.name)
    return child_document(owner, DEPLOYMENT, name, more_labels=_TRACK, annotations=annotations, spec=made)
