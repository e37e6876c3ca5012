"""Conditions as Kubernetes wants them: one of a type, and a transition time that moves only with the status."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from outrider_crds.status import Condition, ConditionStatus, ConditionType, Reason

_MESSAGE_LIMIT = 2048


def condition(
    kind: ConditionType, status: ConditionStatus, reason: Reason, message: str = "", *, generation: int = 0
) -> Condition:
    """A condition that `set_condition` has yet to date. A message beyond the CRD's limit is cut, with an ellipsis."""
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


def set_condition(conditions: Sequence[Condition], new: Condition, now: datetime) -> list[Condition]:
    """`conditions` with `new` in the place of the one of its type; `new.last_transition_time` is ignored.

    The time stays what it was while the status does, whatever happens to reason, message and generation. `now`
    must carry a time zone.
    """
    old = find_condition(conditions, new.type)
    since = old.last_transition_time if old is not None and old.status == new.status else timestamp(now)
    dated = new.model_copy(update={"last_transition_time": since})
    if old is None:
        return [*conditions, dated]
    return [dated if c.type == new.type else c for c in conditions]


def find_condition(conditions: Sequence[Condition], kind: ConditionType) -> Condition | None:
    """The condition of type `kind`, or None before it was first set."""
    return next((c for c in conditions if c.type == kind), None)


def initial_conditions(conditions: Sequence[Condition], generation: int, now: datetime) -> list[Condition]:
    """`conditions` with every type that is not there yet set to Unknown/Pending, in the order of ConditionType."""
    result = list(conditions)
    for kind in ConditionType:
        if find_condition(result, kind) is None:
            pending = condition(
                kind, ConditionStatus.UNKNOWN, Reason.PENDING, "Not evaluated yet.", generation=generation
            )
            result = set_condition(result, pending, now)
    return result


def timestamp(now: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as Kubernetes writes times. Raises ValueError for a time without a zone."""
    if now.tzinfo is None:
        raise ValueError("conditions need a time with a zone; pass datetime.now(UTC)")
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
