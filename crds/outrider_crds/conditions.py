"""Kubernetes conditions: one per type, with a transition time that changes only with the status."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from outrider_crds.status import Condition, ConditionReason, ConditionStatus, ConditionType

_MESSAGE_LIMIT = 2048


def condition(
    kind: ConditionType, status: ConditionStatus, reason: ConditionReason, message: str = "", *, generation: int = 0
) -> Condition:
    """A condition without a time, which `set_condition` adds. A message beyond the CRD's limit ends in an ellipsis."""
    if len(message) > _MESSAGE_LIMIT:
        message = message[: _MESSAGE_LIMIT - 1] + "…"
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        observed_generation=generation,
        last_transition_time="",
    )


def set_condition(conditions: Sequence[Condition], new: Condition, at: datetime) -> list[Condition]:
    """`conditions` with `new` in place of the condition of the same type.

    The transition time changes only with the status, not with reason, message or generation. `at` needs a time zone.
    """
    old = find_condition(conditions, new.type)
    since = old.last_transition_time if old is not None and old.status == new.status else timestamp(at)
    dated = new.model_copy(update={"last_transition_time": since})
    if old is None:
        return [*conditions, dated]
    return [dated if c.type == new.type else c for c in conditions]


def find_condition(conditions: Sequence[Condition], kind: ConditionType) -> Condition | None:
    """The condition of type `kind`; None if it was never set."""
    return next((c for c in conditions if c.type == kind), None)


def initial_conditions(conditions: Sequence[Condition], generation: int, at: datetime) -> list[Condition]:
    """`conditions` with every missing type set to Unknown/Pending, in the order of ConditionType."""
    result = list(conditions)
    for kind in ConditionType:
        if find_condition(result, kind) is None:
            pending = condition(
                kind, ConditionStatus.UNKNOWN, ConditionReason.PENDING, "Not evaluated yet.", generation=generation
            )
            result = set_condition(result, pending, at)
    return result


def timestamp(at: datetime) -> str:
    """Time in Kubernetes' form: RFC 3339, UTC, whole seconds. Raises ValueError for a time without a zone."""
    if at.tzinfo is None:
        raise ValueError("conditions need a time with a zone; pass datetime.now(UTC)")
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
