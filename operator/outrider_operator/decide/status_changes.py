"""Combine verdicts into a status, derive events from its changes, and decide when to write it.

Conditions Reconciling and Stalled, which Flux, Helm and Argo CD read by the rules of kstatus, follow from the others.
Reconciling is True while the spec is not in force on every pod. Stalled is True if that cannot happen without a change
by someone. At most one of them is True.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from outrider_crds.conditions import (
    Condition,
    ConditionReason,
    ConditionStatus,
    ConditionType,
    condition,
    find_condition,
    initial_conditions,
    set_condition,
)
from outrider_crds.rollout_status import RolloutStatus
from outrider_crds.status import SpeculativeServiceStatus

from outrider_operator.decide.outcome import Verdict, Verdicts, false, true
from outrider_operator.plan import Event

_STUCK = (
    ConditionReason.STALLED, ConditionReason.NO_CAPACITY, ConditionReason.DRAFTER_NOT_LOADED,
    ConditionReason.CANARY_FAILED, ConditionReason.CANARY_ERROR, ConditionReason.CANARY_INCONCLUSIVE,
    ConditionReason.POD_SHARED, ConditionReason.NOT_ACTIVE, ConditionReason.RESTART_NEEDED,
)  # fmt: skip
"""Reasons of Progressing that do not go away by waiting."""
_UNMEASURABLE = (
    ConditionReason.PROFILE_FAILED, ConditionReason.NOISY, ConditionReason.NO_MATCHING_NODE,
    ConditionReason.VOCABULARY_MISMATCH,
)  # fmt: skip
"""Reasons of ProfilesReady that do not go away by waiting. They stall a rollout that waits for its profile."""
FIGURES_EVERY_S = 15.0
_FIGURE_FIELDS = frozenset({"summary", "goodput", "slo_classes", "drafts", "adapters", "demand", "prefetch"})
_ROLLOUT_FIGURES = frozenset(
    {"requests", "gain_percent", "gain_range", "summary", "arms", "products", "message", "sums"}
)
"""Fields of `status.rollout` that change with every request of a canary."""
_FIGURE_REASONS = frozenset({ConditionReason.CANARY_MEASURING, ConditionReason.WAITING_FOR_MODELS})
_FIGURE_CONDITIONS = frozenset(
    {ConditionType.SPECULATION_ACTIVE, ConditionType.GOODPUT_HEALTHY, ConditionType.SLO_ATTAINED}
)
"""Conditions whose messages quote figures, and change as often."""
_DERIVED = frozenset({ConditionType.RECONCILING, ConditionType.STALLED})
"""Conditions that repeat another one, which has the event."""
_QUIET = (
    ConditionReason.PENDING, ConditionReason.MEASURING, ConditionReason.NO_TRAFFIC, ConditionReason.NO_SLO_CLASSES,
    ConditionReason.COMPLETE, ConditionReason.NOT_REQUESTED, ConditionReason.NOT_ATTACHED,
    ConditionReason.NO_ADAPTERS, ConditionReason.LOADING, ConditionReason.CANARY_STARTING,
    ConditionReason.CANARY_MEASURING, ConditionReason.CANARY_RUNNING, ConditionReason.CANARY_FAILED,
    ConditionReason.CANARY_ERROR, ConditionReason.CANARY_INCONCLUSIVE,
)  # fmt: skip
"""Reasons without an event: Updated already reports a complete rollout, and a canary has its own events."""
_WELCOME_WHEN_FALSE = (
    ConditionReason.COMPLETE, ConditionReason.PAUSED, ConditionReason.SCALED_TO_ZERO, ConditionReason.OFF,
    ConditionReason.NOT_WORTH_IT, ConditionReason.MEASURED_SLOWER, ConditionReason.LEARNING,
    ConditionReason.WAITING_FOR_MODELS, ConditionReason.PROFILING, ConditionReason.ROLLING_OUT,
    ConditionReason.CONFIG_PENDING, ConditionReason.NO_DRAFTER, ConditionReason.WAITING_FOR_SERVING_POD,
)  # fmt: skip


def with_kstatus(verdicts: Verdicts) -> Verdicts:
    """`verdicts` plus Reconciling and Stalled."""
    cause = _stalled(verdicts)
    stalled = false(ConditionReason.NOT_STALLED, "Not stalled.") if cause is None else true(cause.reason, cause.message)
    return {
        **verdicts,
        ConditionType.RECONCILING: false(ConditionReason.STALLED, "See Stalled.") if cause else _reconciling(verdicts),
        ConditionType.STALLED: stalled,
    }


def _stalled(verdicts: Verdicts) -> Verdict | None:
    """The verdict that keeps the spec from being in force for good; None if none does."""
    spec, progress = verdicts[ConditionType.SPEC_VALID], verdicts[ConditionType.PROGRESSING]
    profiles = verdicts[ConditionType.PROFILES_READY]
    if spec.status is ConditionStatus.FALSE:
        return spec
    if progress.reason in _STUCK:
        return progress
    waits = progress.reason is ConditionReason.WAITING_FOR_PROFILE
    return profiles if waits and profiles.reason in _UNMEASURABLE else None


def _reconciling(verdicts: Verdicts) -> Verdict:
    """Reconciling while Updated or Available is not True: like a Deployment, missing pods count."""
    for kind in (ConditionType.UPDATED, ConditionType.AVAILABLE):
        if (verdict := verdicts[kind]).status is not ConditionStatus.TRUE:
            return true(verdict.reason, verdict.message)
    return false(ConditionReason.RECONCILED, "The spec is in force on every pod.")


@dataclass(frozen=True)
class StatusWrite:
    """Whether to write a status now, or when to check again."""

    is_due: bool
    again_in_s: float | None = None


def with_verdicts(
    status: SpeculativeServiceStatus, verdicts: Verdicts, generation: int, at: float
) -> SpeculativeServiceStatus:
    """`status` with a condition for each verdict, and Unknown for each type that has none."""
    moment = datetime.fromtimestamp(at, UTC)
    conditions: list[Condition] = list(status.conditions)
    for kind, verdict in verdicts.items():
        new = condition(kind, verdict.status, verdict.reason, verdict.message, generation=generation)
        conditions = set_condition(conditions, new, moment)
    conditions = initial_conditions(conditions, generation, moment)
    order = list(ConditionType)
    return status.model_copy(update={"conditions": sorted(conditions, key=lambda c: order.index(c.type))})


def status_write(
    old: SpeculativeServiceStatus, new: SpeculativeServiceStatus, at: float, figures_written_at: float | None
) -> StatusWrite:
    """Write changed conditions, counts and profiles at once, but figures at most every 15 s.

    Figures have three significant digits, so that noise changes nothing.
    figures_written_at: when this process last wrote a status of the service; None if it has not.
    """
    if old == new:
        return StatusWrite(is_due=False)
    if _without_figures(old) != _without_figures(new):
        return StatusWrite(is_due=True)
    wait_s = 0.0 if figures_written_at is None else figures_written_at + FIGURES_EVERY_S - at
    return StatusWrite(is_due=wait_s <= 0, again_in_s=wait_s if wait_s > 0 else None)


def events(old: SpeculativeServiceStatus, new: SpeculativeServiceStatus) -> tuple[Event, ...]:
    """Events for conditions whose status or reason changed in a way that matters to users.

    A new service has no last status, and no pod can be ready yet: only a spec that is not applied gets an event.
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
