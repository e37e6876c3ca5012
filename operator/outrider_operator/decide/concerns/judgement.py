"""Conditions SpeculationActive, GoodputHealthy and SLOAttained, judged by the figures. None of them affects Ready.

A measurement has four outcomes: good, bad, too few samples, and not available. The last two never count as bad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outrider_crds.base import seconds
from outrider_crds.conditions import ConditionReason, ConditionStatus, ConditionType
from outrider_crds.profile import DrafterProfile, ProfileExecutionMode, ProfileStepCost, TargetProfile
from outrider_crds.spec import SLOClassSpec, SpeculationMode, SpeculativeServiceSpec

from outrider_operator.decide.figures import samples
from outrider_operator.decide.outcome import Verdict, false, true, unknown
from outrider_operator.decide.profiling.product_profiles import ProductProfile
from outrider_operator.figure_windows import WindowCounts

_STILL_USED_SHARE = 0.025
"""Lower threshold for a condition that is True: a load near the crossover must not flip it at every reconcile."""

_MEASURED_REASONS = (
    ConditionReason.GOODPUT_AS_PREDICTED, ConditionReason.BELOW_BASELINE, ConditionReason.ATTAINED,
    ConditionReason.MISSED,
)  # fmt: skip

Judge = Callable[[SpeculativeServiceSpec, WindowCounts], Verdict]
_MARGIN = 0.9
"""Hysteresis: a class is infeasible below this share of the best TPOT, and feasible again only above the best TPOT."""


def speculation_active(behaviour: samples.MeasuredBehaviour, spec: SpeculativeServiceSpec) -> Verdict:
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


def goodput_healthy(behaviour: samples.MeasuredBehaviour, spec: SpeculativeServiceSpec) -> Verdict:
    """False when speculation was slower than plain decoding in two windows in a row."""
    return _two_windows(behaviour, spec, ConditionType.GOODPUT_HEALTHY, _goodput)


def slo_attained(
    behaviour: samples.MeasuredBehaviour, spec: SpeculativeServiceSpec, profiles: list[ProductProfile]
) -> Verdict:
    """True when every class with traffic meets its objective. It changes after two windows that agree."""
    if not spec.slo_classes:
        return unknown(ConditionReason.NO_SLO_CLASSES, "spec.sloClasses is empty: there is nothing to attain.")
    return infeasible(behaviour, spec, profiles) or _two_windows(behaviour, spec, ConditionType.SLO_ATTAINED, _slo)


def _use(figures: WindowCounts, *, active: bool) -> Verdict:
    if figures.gained.output_tokens < samples.LEAST_TOKENS:
        return unknown(ConditionReason.NO_TRAFFIC, f"Fewer than {samples.LEAST_TOKENS} tokens in the last window.")
    share, gain = samples.used_share(figures), samples.speedup(figures)
    percent = samples.three_digits(100 * share)
    if share < (_STILL_USED_SHARE if active else samples.USED_SHARE):
        return false(
            ConditionReason.NOT_WORTH_IT,
            f"Plain decoding is faster at this load; {percent}% of requests' steps still try drafts.",
        )
    used = f"{percent}% of requests' steps speculate; {_said(gain)}."
    return (
        true(ConditionReason.PAYS, used)
        if gain is None or gain.high >= 1
        else false(ConditionReason.MEASURED_SLOWER, used)
    )


def _goodput(_spec: SpeculativeServiceSpec, figures: WindowCounts) -> Verdict:
    if figures.gained.output_tokens < samples.LEAST_TOKENS:
        return unknown(ConditionReason.NO_TRAFFIC, f"Fewer than {samples.LEAST_TOKENS} tokens in the last window.")
    gain = samples.speedup(figures)
    if samples.used_share(figures) < samples.USED_SHARE:
        return true(
            ConditionReason.GOODPUT_AS_PREDICTED, "Requests decode without speculation, at the baseline's goodput."
        )
    if gain is None:
        return unknown(
            ConditionReason.MEASURING,
            f"Fewer than {samples.LEAST_PROBES} probes without speculation have run to compare with.",
        )
    measured = f"Goodput / plain goodput: {_said(gain)}."
    if gain.high < 1:
        return false(
            ConditionReason.BELOW_BASELINE,
            f'{measured} If this lasts, set speculation.mode: "Off" or change the drafts.',
        )
    return true(ConditionReason.GOODPUT_AS_PREDICTED, measured)


def _said(gain: samples.Speedup | None) -> str:
    if gain is None:
        return "the speed-up is being measured"
    between = f"between {samples.three_digits(gain.low)} and {samples.three_digits(gain.high)}"
    if not gain.is_significant:
        return f"the speed-up does not differ from 1 beyond noise yet, it is {between}"
    return f"the speed-up is {samples.three_digits(gain.value)}x, {between}"


def _slo(spec: SpeculativeServiceSpec, figures: WindowCounts) -> Verdict:
    judged = [(slo, share) for slo in spec.slo_classes if (share := samples.attainment(figures, slo.name)) is not None]
    if not judged:
        return unknown(
            ConditionReason.NO_TRAFFIC, f"No class has {samples.LEAST_REQUESTS} finished requests in the last window."
        )
    attained = "; ".join(
        f"{slo.name} {samples.three_digits(100 * share)}% (objective {slo.objective_percent}%)" for slo, share in judged
    )
    if any(100 * share < slo.objective_percent for slo, share in judged):
        return false(
            ConditionReason.MISSED,
            f"Requests within their SLO, by class: {attained}. Add replicas, or loosen the class.",
        )
    return true(ConditionReason.ATTAINED, f"Requests within their SLO, by class: {attained}.")


def _two_windows(
    behaviour: samples.MeasuredBehaviour, spec: SpeculativeServiceSpec, kind: ConditionType, judge: Judge
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


def _last_measured(behaviour: samples.MeasuredBehaviour, kind: ConditionType) -> Verdict | None:
    """The last verdict, if it was measured; None otherwise (Infeasible comes from the profile)."""
    condition = behaviour.last_condition(kind)
    if condition is None or condition.status is ConditionStatus.UNKNOWN or condition.reason not in _MEASURED_REASONS:
        return None
    return Verdict(condition.status, ConditionReason(condition.reason), condition.message)


def _without_figures(behaviour: samples.MeasuredBehaviour) -> Verdict:
    if behaviour.windows.error:
        return unknown(ConditionReason.METRICS_UNAVAILABLE, behaviour.windows.error)
    last = behaviour.last_condition(ConditionType.SPECULATION_ACTIVE)
    if (
        last is not None
        and last.reason in (ConditionReason.PAYS, ConditionReason.NOT_WORTH_IT, ConditionReason.MEASURED_SLOWER)
        and behaviour.between_windows
    ):
        return Verdict(last.status, ConditionReason(last.reason), last.message)
    return unknown(ConditionReason.MEASURING, "Not measured for a whole window yet.")


def best_tpot_s(
    target: TargetProfile,
    drafters: Mapping[str, DrafterProfile],
    acceptance: Mapping[str, float],
    max_draft_tokens: int,
) -> float:
    """Seconds per token of a single request at the best drafter and draft length `k`, including `k = 0`.

    It is the minimum of `T_step(k) / l(alpha, k)` (TurboSpec eq. 2 to 4). `drafters` and `acceptance` are keyed by
    name. Contexts are empty and a drafter without a measured acceptance rate counts as always accepted, so that the
    result is a lower bound.
    """
    cost = target.costs.get(ProfileExecutionMode.UNIFORM) or next(iter(target.costs.values()), ProfileStepCost())
    best = cost.without_context_s(1, 1)
    for name, drafter in drafters.items():
        alpha = acceptance.get(name, 1.0)
        for k in range(1, max_draft_tokens + 1):
            total = draft_s(drafter, k) + cost.without_context_s(1, k + 1)
            best = min(best, total / accepted_length(alpha, k))
    return best


def draft_s(drafter: DrafterProfile, k: int) -> float:
    """Seconds to propose `k` tokens. The first pass covers the target's tokens, each further pass one token."""
    if not drafter.autoregressive:
        return drafter.cost.without_context_s(1, 1)
    first_s = drafter.cost.without_context_s(1, k + 1) + drafter.first_pass.without_context_s(1, k + 1)
    return first_s + (k - 1) * drafter.cost.without_context_s(1, 1)


def accepted_length(alpha: float, k: int) -> float:
    """`l(alpha, k) = (1 - alpha^(k+1)) / (1 - alpha)`, including the bonus token."""
    return sum(alpha**position for position in range(k + 1))


def infeasible(
    behaviour: samples.MeasuredBehaviour, spec: SpeculativeServiceSpec, profiles: list[ProductProfile]
) -> Verdict | None:
    """Verdict False if a class has a lower TPOT than any product can reach; None while a product is unmeasured."""
    best = [value for profile in profiles if (value := _best_tpot_s(behaviour, spec, profile)) is not None]
    if len(best) < len(profiles) or not best:
        return None
    reachable_s = min(best)
    limit_s = reachable_s * (1.0 if _was_infeasible(behaviour) else _MARGIN)
    beyond = [slo for slo in spec.slo_classes if seconds(slo.tpot) < limit_s and not _is_met(behaviour, slo)]
    return _infeasible(beyond, reachable_s) if beyond else None


def _was_infeasible(behaviour: samples.MeasuredBehaviour) -> bool:
    condition = behaviour.last_condition(ConditionType.SLO_ATTAINED)
    return condition is not None and condition.reason == ConditionReason.INFEASIBLE


def _is_met(behaviour: samples.MeasuredBehaviour, slo: SLOClassSpec) -> bool:
    """Do requests meet the class? If they do, the profile is wrong, not the class."""
    figures = behaviour.windows.current
    share = samples.attainment(figures, slo.name) if figures is not None else None
    return share is not None and 100 * share >= slo.objective_percent


def _infeasible(beyond: list[SLOClassSpec], reachable_s: float) -> Verdict:
    classes = " and ".join(f"{slo.name} ({slo.tpot})" for slo in beyond)
    return false(
        ConditionReason.INFEASIBLE,
        f"No request can meet the tpot of {classes}: by the latency profile the best that this hardware reaches, for "
        f"one request alone, is {samples.time_text(reachable_s)}. Set tpot above it, or use a faster product or draft.",
    )


def _best_tpot_s(
    behaviour: samples.MeasuredBehaviour, spec: SpeculativeServiceSpec, profile: ProductProfile
) -> float | None:
    if profile.store.target is None or not profile.store.has_target(profile.keys):
        return None
    stored, speculation = profile.store.drafters, spec.speculation
    measured = {name: stored[key] for name, key in profile.keys.drafters.items() if key in stored}
    drafters = measured if speculation.mode is not SpeculationMode.OFF else {}
    return best_tpot_s(profile.store.target, drafters, _acceptance(behaviour), speculation.max_draft_tokens)


def _acceptance(behaviour: samples.MeasuredBehaviour) -> dict[str, float]:
    """Acceptance rate by drafter name, for drafters with enough tokens in the window."""
    figures = behaviour.windows.current
    if figures is None:
        return {}
    return {
        name: d.accepted / d.tried for name, d in figures.gained.drafters.items() if d.tried >= samples.LEAST_TOKENS
    }
