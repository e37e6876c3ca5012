"""The concern of the draft canary: its objects, conditions and events, and status.rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outrider_crds.status import ConditionReason, RolloutStatus, SpeculativeServiceStatus

from outrider_operator.decide.canary.canary_objects import canary_children
from outrider_operator.decide.canary.draft_canary import CanaryRollout
from outrider_operator.decide.canary.phases import CanaryPhase, is_foreign
from outrider_operator.decide.canary.summary import message_of, rollout_status
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import ConcernOutcome
from outrider_operator.decide.service_world import ServiceWorld
from outrider_operator.decide.verdict import Verdict, false, true
from outrider_operator.plan import Event
from outrider_operator.validation.reading import cut

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
