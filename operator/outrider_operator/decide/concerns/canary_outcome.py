"""The concern of the draft canary: its objects, and status.rollout."""

from __future__ import annotations

from dataclasses import replace

from outrider_operator.decide.canary.canary_objects import canary_children
from outrider_operator.decide.conditions.canary import canary_status
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import ConcernOutcome
from outrider_operator.decide.service_world import ServiceWorld


def draft_canary(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """Objects and status of the canary. A refused spec changes no object of it."""
    canary = intent.canary
    objects = canary_children(canary) if intent.problem is None else ConcernOutcome()
    status = canary_status(canary, world.observed.status.rollout, world.observed.generation)
    return replace(objects, status={"rollout": status}, wake_after_s=canary.next_look_s)
