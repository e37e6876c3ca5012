"""Conditions SpeculationActive, GoodputHealthy and SLOAttained, judged by the figures. None of them affects Ready.

A measurement has four outcomes: good, bad, too few samples, and not available. The last two never count as bad.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider_crds.spec import SpeculationMode, SpeculativeServiceSpec
from outrider_crds.status import ConditionReason, ConditionStatus, ConditionType

from outrider_operator.cluster_model import WindowCounts
from outrider_operator.decide.concerns.feasibility import infeasible
from outrider_operator.decide.figures.behaviour import MeasuredBehaviour
from outrider_operator.decide.figures.numbers import three_digits
from outrider_operator.decide.figures.samples import (
    LEAST_PROBES,
    LEAST_REQUESTS,
    LEAST_TOKENS,
    USED_SHARE,
    Speedup,
    attainment,
    speedup,
    used_share,
)
from outrider_operator.decide.profiling.product_profiles import ProductProfile
from outrider_operator.decide.verdict import Verdict, false, true, unknown

_STILL_USED_SHARE = 0.025
"""Lower threshold for a condition that is True: a load near the crossover must not flip it at every reconcile."""

_MEASURED_REASONS = frozenset(
    {
        ConditionReason.GOODPUT_AS_PREDICTED,
        ConditionReason.BELOW_BASELINE,
        ConditionReason.ATTAINED,
        ConditionReason.MISSED,
    }
)

Judge = Callable[[SpeculativeServiceSpec, WindowCounts], Verdict]


def speculation_active(behaviour: MeasuredBehaviour, spec: SpeculativeServiceSpec) -> Verdict:
    """True when speculation is used and pays, judged by the window that ends now."""
    if spec.speculation.mode is SpeculationMode.OFF:
        return false(ConditionReason.OFF, "speculation.mode is Off.")
    if not spec.draft_pool:
        return false(ConditionReason.NO_DRAFTER, "spec.draftPool is empty: there is nothing to speculate with.")
    if all(drafter.paused for drafter in spec.draft_pool):
        return false(ConditionReason.NO_DRAFTER, "Every drafter of spec.draftPool is paused.")
    states = behaviour.states.values()
    if states and not any(drafter.loaded for state in states for drafter in state.drafters):
        reasons = sorted({drafter.reason for state in states for drafter in state.drafters if drafter.reason})
        return false(ConditionReason.NO_DRAFTER, f"No pod has a drafter loaded. {'; '.join(reasons[:3])}".strip())
    figures = behaviour.windows.current
    if figures is None:
        return _without_figures(behaviour)
    last = behaviour.last_condition(ConditionType.SPECULATION_ACTIVE)
    return _use(figures, active=last is not None and last.status is ConditionStatus.TRUE)


def goodput_healthy(behaviour: MeasuredBehaviour, spec: SpeculativeServiceSpec) -> Verdict:
    """False when speculation was slower than plain decoding in two windows in a row."""
    return _two_windows(behaviour, spec, ConditionType.GOODPUT_HEALTHY, _goodput)


def slo_attained(behaviour: MeasuredBehaviour, spec: SpeculativeServiceSpec, profiles: list[ProductProfile]) -> Verdict:
    """True when every class with traffic meets its objective. It changes after two windows that agree."""
    if not spec.slo_classes:
        return unknown(ConditionReason.NO_SLO_CLASSES, "spec.sloClasses is empty: there is nothing to attain.")
    return infeasible(behaviour, spec, profiles) or _two_windows(behaviour, spec, ConditionType.SLO_ATTAINED, _slo)


def _use(figures: WindowCounts, *, active: bool) -> Verdict:
    if figures.gained.output_tokens < LEAST_TOKENS:
        return unknown(ConditionReason.NO_TRAFFIC, f"Fewer than {LEAST_TOKENS} tokens in the last window.")
    share, gain = used_share(figures), speedup(figures)
    percent = three_digits(100 * share)
    if share < (_STILL_USED_SHARE if active else USED_SHARE):
        return false(
            ConditionReason.NOT_WORTH_IT,
            f"Plain decoding is faster at this load; {percent}% of requests' steps still try drafts.",
        )
    used = f"{percent}% of requests' steps speculate; {_said(gain)}."
    return (
        true(ConditionReason.PAYS, used)
        if gain is None or gain.high >= 1
        else false(ConditionReason.NOT_WORTH_IT, used)
    )


def _goodput(_spec: SpeculativeServiceSpec, figures: WindowCounts) -> Verdict:
    if figures.gained.output_tokens < LEAST_TOKENS:
        return unknown(ConditionReason.NO_TRAFFIC, f"Fewer than {LEAST_TOKENS} tokens in the last window.")
    gain = speedup(figures)
    if used_share(figures) < USED_SHARE:
        return true(
            ConditionReason.GOODPUT_AS_PREDICTED, "Requests decode without speculation, at the baseline's goodput."
        )
    if gain is None:
        return unknown(
            ConditionReason.MEASURING, f"Fewer than {LEAST_PROBES} probes without speculation have run to compare with."
        )
    measured = f"Goodput / plain goodput: {_said(gain)}."
    if gain.high < 1:
        return false(
            ConditionReason.BELOW_BASELINE,
            f'{measured} If this lasts, set speculation.mode: "Off" or change the drafts.',
        )
    return true(ConditionReason.GOODPUT_AS_PREDICTED, measured)


def _said(gain: Speedup | None) -> str:
    if gain is None:
        return "the speed-up is being measured"
    between = f"between {three_digits(gain.low)} and {three_digits(gain.high)}"
    if not gain.is_significant:
        return f"the speed-up does not differ from 1 beyond noise yet, it is {between}"
    return f"the speed-up is {three_digits(gain.value)}x, {between}"


def _slo(spec: SpeculativeServiceSpec, figures: WindowCounts) -> Verdict:
    judged = [(slo, share) for slo in spec.slo_classes if (share := attainment(figures, slo.name)) is not None]
    if not judged:
        return unknown(
            ConditionReason.NO_TRAFFIC, f"No class has {LEAST_REQUESTS} finished requests in the last window."
        )
    attained = "; ".join(
        f"{slo.name} {three_digits(100 * share)}% (objective {slo.objective_percent}%)" for slo, share in judged
    )
    if any(100 * share < slo.objective_percent for slo, share in judged):
        return false(
            ConditionReason.MISSED,
            f"Requests within their SLO, by class: {attained}. Add replicas, or loosen the class.",
        )
    return true(ConditionReason.ATTAINED, f"Requests within their SLO, by class: {attained}.")


def _two_windows(
    behaviour: MeasuredBehaviour, spec: SpeculativeServiceSpec, kind: ConditionType, judge: Judge
) -> Verdict:
    """The verdict of this window if the window before it agrees, else the last verdict.

    The first verdict after Unknown needs only one window.
    """
    windows, last = behaviour.windows, _last_measured(behaviour, kind)
    if windows.error:
        return unknown(ConditionReason.METRICS_UNAVAILABLE, windows.error)
    if windows.current is None:
        return last or unknown(ConditionReason.NO_TRAFFIC, "Not measured for a whole window yet.")
    current = judge(spec, windows.current)
    if last is None or last.status is current.status:
        return current
    previous = judge(spec, windows.previous) if windows.previous is not None else None
    return current if previous is not None and previous.status is current.status else last


def _last_measured(behaviour: MeasuredBehaviour, kind: ConditionType) -> Verdict | None:
    """The last verdict, if it was measured; None otherwise (Infeasible comes from the profile)."""
    condition = behaviour.last_condition(kind)
    if condition is None or condition.status is ConditionStatus.UNKNOWN or condition.reason not in _MEASURED_REASONS:
        return None
    return Verdict(condition.status, ConditionReason(condition.reason), condition.message)


def _without_figures(behaviour: MeasuredBehaviour) -> Verdict:
    if behaviour.windows.error:
        return unknown(ConditionReason.METRICS_UNAVAILABLE, behaviour.windows.error)
    last = behaviour.last_condition(ConditionType.SPECULATION_ACTIVE)
    if (
        last is not None
        and last.reason in (ConditionReason.PAYS, ConditionReason.NOT_WORTH_IT)
        and behaviour.between_windows
    ):
        return Verdict(last.status, ConditionReason(last.reason), last.message)
    return unknown(ConditionReason.MEASURING, "Not measured for a whole window yet.")
