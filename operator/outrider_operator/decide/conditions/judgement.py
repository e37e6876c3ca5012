"""Conditions SpeculationActive, GoodputHealthy and SLOAttained: what the figures say. None of them feeds Ready.

A measurement has four outcomes: good, bad, too little to tell, and not available; the last two are never bad.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider_crds.spec import SpeculationMode, SpeculativeServiceSpec
from outrider_crds.status import ConditionStatus, ConditionType, Reason

from outrider_operator.decide.conditions.feasibility import infeasible
from outrider_operator.decide.conditions.verdict import Verdict, false, true, unknown
from outrider_operator.decide.figures.behaviour import Behaviour
from outrider_operator.decide.figures.numbers import three_digits
from outrider_operator.decide.figures.samples import (
    LEAST_PROBES,
    LEAST_REQUESTS,
    LEAST_TOKENS,
    Speedup,
    attainment,
    speedup,
    used_share,
)
from outrider_operator.decide.profiling.product_profiles import ProductProfile
from outrider_operator.model import Figures

USED_SHARE = 0.05
"""Speculation counts as used from this share of (request, step) pairs on: exploring while off takes 1%."""
_STILL_USED_SHARE = 0.025
"""The same for a condition that is True: a load near the crossover must not flip it at every look."""

_MEASURED_REASONS = frozenset({Reason.GOODPUT_AS_PREDICTED, Reason.BELOW_BASELINE, Reason.ATTAINED, Reason.MISSED})

Judge = Callable[[SpeculativeServiceSpec, Figures], Verdict]


def speculation_active(behaviour: Behaviour, spec: SpeculativeServiceSpec) -> Verdict:
    """True when speculation is used and pays. Follows the window that ends now."""
    if spec.speculation.mode is SpeculationMode.OFF:
        return false(Reason.OFF, "speculation.mode is Off.")
    if not spec.draft_pool:
        return false(Reason.NO_DRAFTER, "spec.draftPool is empty: there is nothing to speculate with.")
    if all(drafter.paused for drafter in spec.draft_pool):
        return false(Reason.NO_DRAFTER, "Every drafter of spec.draftPool is paused.")
    states = behaviour.states.values()
    if states and not any(drafter.loaded for state in states for drafter in state.drafters):
        said = sorted({drafter.reason for state in states for drafter in state.drafters if drafter.reason})
        return false(Reason.NO_DRAFTER, f"No pod has a drafter loaded. {'; '.join(said[:3])}".strip())
    figures = behaviour.windows.current
    if figures is None:
        return _without_figures(behaviour)
    standing = behaviour.standing_condition(ConditionType.SPECULATION_ACTIVE)
    return _use(figures, active=standing is not None and standing.status is ConditionStatus.TRUE)


def goodput_healthy(behaviour: Behaviour, spec: SpeculativeServiceSpec) -> Verdict:
    """False when speculation costs more than it gains, for two windows."""
    return _two_windows(behaviour, spec, ConditionType.GOODPUT_HEALTHY, _goodput)


def slo_attained(behaviour: Behaviour, spec: SpeculativeServiceSpec, found: list[ProductProfile]) -> Verdict:
    """True when every class that has traffic meets its objective; changes after two windows."""
    if not spec.slo_classes:
        return unknown(Reason.NO_SLO_CLASSES, "spec.sloClasses is empty: there is nothing to attain.")
    return infeasible(behaviour, spec, found) or _two_windows(behaviour, spec, ConditionType.SLO_ATTAINED, _slo)


def _use(figures: Figures, *, active: bool) -> Verdict:
    if figures.output_tokens < LEAST_TOKENS:
        return unknown(Reason.NO_TRAFFIC, f"Fewer than {LEAST_TOKENS} tokens in the last window.")
    share, gain = used_share(figures), speedup(figures)
    percent = three_digits(100 * share)
    if share < (_STILL_USED_SHARE if active else USED_SHARE):
        return false(
            Reason.NOT_WORTH_IT,
            f"Plain decoding is faster at this load: {percent}% of requests' steps speculate, to see it change.",
        )
    used = f"{percent}% of requests' steps speculate; {_said(gain)}."
    return true(Reason.PAYS, used) if gain is None or gain.high >= 1 else false(Reason.NOT_WORTH_IT, used)


def _goodput(_spec: SpeculativeServiceSpec, figures: Figures) -> Verdict:
    if figures.output_tokens < LEAST_TOKENS:
        return unknown(Reason.NO_TRAFFIC, f"Fewer than {LEAST_TOKENS} tokens in the last window.")
    gain = speedup(figures)
    if used_share(figures) < USED_SHARE:
        return true(Reason.GOODPUT_AS_PREDICTED, "Requests decode without speculation, at the baseline's goodput.")
    if gain is None:
        return unknown(
            Reason.MEASURING, f"Fewer than {LEAST_PROBES} probes without speculation have run to compare with."
        )
    measured = f"Goodput / plain goodput: {_said(gain)}."
    if gain.high < 1:
        return false(
            Reason.BELOW_BASELINE, f'{measured} If this lasts, set speculation.mode: "Off" or change the drafts.'
        )
    return true(Reason.GOODPUT_AS_PREDICTED, measured)


def _said(gain: Speedup | None) -> str:
    if gain is None:
        return "the speed-up is being measured"
    between = f"between {three_digits(gain.low)} and {three_digits(gain.high)}"
    if not gain.told:
        return f"the speed-up does not differ from 1 beyond noise yet, it is {between}"
    return f"the speed-up is {three_digits(gain.value)}x, {between}"


def _slo(spec: SpeculativeServiceSpec, figures: Figures) -> Verdict:
    judged = [(slo, share) for slo in spec.slo_classes if (share := attainment(figures, slo.name)) is not None]
    if not judged:
        return unknown(Reason.NO_TRAFFIC, f"No class has {LEAST_REQUESTS} finished requests in the last window.")
    told = "; ".join(f"{slo.name} {three_digits(100 * share)}% of {slo.objective_percent}%" for slo, share in judged)
    if any(100 * share < slo.objective_percent for slo, share in judged):
        return false(Reason.MISSED, f"Requests within their SLO, by class: {told}. Add replicas, or loosen the class.")
    return true(Reason.ATTAINED, f"Requests within their SLO, by class: {told}.")


def _two_windows(behaviour: Behaviour, spec: SpeculativeServiceSpec, kind: ConditionType, judge: Judge) -> Verdict:
    """The verdict of this window if the one before it says the same, else the one that stands.

    The first verdict after Unknown needs one window; after that one odd minute changes nothing.
    """
    windows, standing = behaviour.windows, _standing(behaviour, kind)
    if windows.error:
        return unknown(Reason.METRICS_UNAVAILABLE, windows.error)
    if windows.current is None:
        return standing or unknown(Reason.NO_TRAFFIC, "Not measured for a whole window yet.")
    now = judge(spec, windows.current)
    if standing is None or standing.status is now.status:
        return now
    before = judge(spec, windows.previous) if windows.previous is not None else None
    return now if before is not None and before.status is now.status else standing


def _standing(behaviour: Behaviour, kind: ConditionType) -> Verdict | None:
    """The measured verdict that stands; None where there is none (Infeasible comes from the profile)."""
    found = behaviour.standing_condition(kind)
    if found is None or found.status is ConditionStatus.UNKNOWN or found.reason not in _MEASURED_REASONS:
        return None
    return Verdict(found.status, Reason(found.reason), found.message)


def _without_figures(behaviour: Behaviour) -> Verdict:
    if behaviour.windows.error:
        return unknown(Reason.METRICS_UNAVAILABLE, behaviour.windows.error)
    standing = behaviour.standing_condition(ConditionType.SPECULATION_ACTIVE)
    if standing is not None and standing.reason in (Reason.PAYS, Reason.NOT_WORTH_IT) and behaviour.between_windows:
        return Verdict(standing.status, Reason(standing.reason), standing.message)
    return unknown(Reason.MEASURING, "Not measured for a whole window yet.")
