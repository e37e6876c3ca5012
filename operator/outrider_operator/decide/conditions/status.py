"""The whole status from its parts, the events that its changes deserve, and when it is worth writing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from outrider_crds.conditions import condition, find_condition, initial_conditions, set_condition
from outrider_crds.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    Reason,
    RolloutStatus,
    SpeculativeServiceStatus,
)

from outrider_operator.decide.conditions.verdict import Verdicts
from outrider_operator.plan import Event

FIGURES_EVERY_S = 15.0
_FIGURE_FIELDS = frozenset({"summary", "goodput", "slo_classes", "drafts", "demand"})


_ROLLOUT_FIGURES = frozenset(
    {"requests", "gain_percent", "gain_range", "summary", "arms", "products", "message", "sums"}
)
"""Fields of `status.rollout` that change with every request of a canary."""
_FIGURE_REASONS = frozenset({Reason.CANARY_MEASURING})
_FIGURE_CONDITIONS = frozenset(
    {ConditionType.SPECULATION_ACTIVE, ConditionType.GOODPUT_HEALTHY, ConditionType.SLO_ATTAINED}
)
"""Their messages quote figures, and change as often."""
_DERIVED = frozenset({ConditionType.RECONCILING, ConditionType.STALLED})
"""They repeat what another one has an event for."""
_QUIET = frozenset(
    {Reason.PENDING, Reason.MEASURING, Reason.NO_TRAFFIC, Reason.NO_SLO_CLASSES, Reason.COMPLETE}
    | {Reason.CANARY_STARTING, Reason.CANARY_MEASURING, Reason.CANARY_RUNNING}
    | {Reason.CANARY_FAILED, Reason.CANARY_ERROR, Reason.CANARY_INCONCLUSIVE}
)
"""Not worth an event: `Updated` tells of a rollout that is complete, and a canary has events of its own."""
_WELCOME_WHEN_FALSE = frozenset(
    {Reason.COMPLETE, Reason.PAUSED, Reason.SCALED_TO_ZERO, Reason.OFF, Reason.NOT_WORTH_IT, Reason.LEARNING}
    | {Reason.PROFILING, Reason.ROLLING_OUT, Reason.CONFIG_PENDING, Reason.NO_DRAFTER, Reason.WAITING_FOR_SERVING_POD}
)


@dataclass(frozen=True)
class StatusWrite:
    """Whether to write a status now, or when to think of it again."""

    now: bool
    again_in_s: float | None = None


def with_verdicts(
    status: SpeculativeServiceStatus, verdicts: Verdicts, generation: int, now: float
) -> SpeculativeServiceStatus:
    """`status` with a condition for each verdict, and Unknown for each type that was never set."""
    moment = datetime.fromtimestamp(now, UTC)
    conditions: list[Condition] = list(status.conditions)
    for kind, verdict in verdicts.items():
        new = condition(kind, verdict.status, verdict.reason, verdict.message, generation=generation)
        conditions = set_condition(conditions, new, moment)
    conditions = initial_conditions(conditions, generation, moment)
    order = list(ConditionType)
    return status.model_copy(update={"conditions": sorted(conditions, key=lambda c: order.index(c.type))})


def status_write(
    old: SpeculativeServiceStatus, new: SpeculativeServiceStatus, now: float, figures_written_at: float | None
) -> StatusWrite:
    """Conditions, counts and profiles are written at once; figures at most every 15 s.

    All figures are printed with three significant digits, so that "changed" is "printed otherwise".
    `figures_written_at` is when this process last wrote any status of the service; None when it has not.
    """
    if old == new:
        return StatusWrite(now=False)
    if _without_figures(old) != _without_figures(new):
        return StatusWrite(now=True)
    left = 0.0 if figures_written_at is None else figures_written_at + FIGURES_EVERY_S - now
    return StatusWrite(now=left <= 0, again_in_s=left if left > 0 else None)


def events(old: SpeculativeServiceStatus, new: SpeculativeServiceStatus) -> tuple[Event, ...]:
    """One for each condition that changed its status or reason in a way that a user wants to know.

    Of a new service nothing has changed yet, and no pod can be ready: only a spec that is not applied is worth one.
    """
    return tuple(event for kind in ConditionType if (event := _event(kind, old, new)) is not None)


def _without_figures(status: SpeculativeServiceStatus) -> SpeculativeServiceStatus:
    blank = SpeculativeServiceStatus()
    conditions = [c.model_copy(update={"message": ""}) if _quotes_figures(c) else c for c in status.conditions]
    rollout = _without_rollout_figures(status.rollout) if status.rollout is not None else None
    blanks = {name: getattr(blank, name) for name in _FIGURE_FIELDS}
    return status.model_copy(update={**blanks, "conditions": conditions, "rollout": rollout})


def _quotes_figures(condition: Condition) -> bool:
    return condition.type in _FIGURE_CONDITIONS or condition.reason in _FIGURE_REASONS


def _without_rollout_figures(rollout: RolloutStatus) -> RolloutStatus:
    blank = RolloutStatus()
    return rollout.model_copy(update={name: getattr(blank, name) for name in _ROLLOUT_FIGURES})


def _event(kind: ConditionType, old: SpeculativeServiceStatus, new: SpeculativeServiceStatus) -> Event | None:
    before, after = find_condition(old.conditions, kind), find_condition(new.conditions, kind)
    if after is None or after.reason in _QUIET or kind in _DERIVED:
        return None
    if before is not None and (before.status, before.reason) == (after.status, after.reason):
        return None
    bad = after.status is ConditionStatus.FALSE and after.reason not in _WELCOME_WHEN_FALSE
    if before is None and not (bad and kind is ConditionType.SPEC_VALID):
        return None
    return Event(warning=bad, reason=f"{kind}{after.reason}", message=after.message)
