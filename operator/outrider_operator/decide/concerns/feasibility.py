"""Detect SLO classes that no request can meet on this hardware, according to its latency profile."""

from __future__ import annotations

from outrider_crds.base import seconds
from outrider_crds.spec import SLOClassSpec, SpeculationMode, SpeculativeServiceSpec
from outrider_crds.status import ConditionReason, ConditionType

from outrider_operator.decide.figures.behaviour import MeasuredBehaviour
from outrider_operator.decide.figures.best_latency import best_tpot_s
from outrider_operator.decide.figures.numbers import time_text
from outrider_operator.decide.figures.samples import LEAST_TOKENS, attainment
from outrider_operator.decide.profiling.product_profiles import ProductProfile
from outrider_operator.decide.verdict import Verdict, false

_MARGIN = 0.9
"""Hysteresis: a class is infeasible below this share of the best TPOT, and feasible again only above the best TPOT."""


def infeasible(
    behaviour: MeasuredBehaviour, spec: SpeculativeServiceSpec, profiles: list[ProductProfile]
) -> Verdict | None:
    """Verdict False if a class has a lower TPOT than any product can reach; None while a product is unmeasured."""
    best = [value for profile in profiles if (value := _best_tpot_s(behaviour, spec, profile)) is not None]
    if len(best) < len(profiles) or not best:
        return None
    reachable_s = min(best)
    limit_s = reachable_s * (1.0 if _was_infeasible(behaviour) else _MARGIN)
    beyond = [slo for slo in spec.slo_classes if seconds(slo.tpot) < limit_s and not _is_met(behaviour, slo)]
    return _sentence(beyond, reachable_s) if beyond else None


def _was_infeasible(behaviour: MeasuredBehaviour) -> bool:
    condition = behaviour.last_condition(ConditionType.SLO_ATTAINED)
    return condition is not None and condition.reason == ConditionReason.INFEASIBLE


def _is_met(behaviour: MeasuredBehaviour, slo: SLOClassSpec) -> bool:
    """Do requests meet the class? If they do, the profile is wrong, not the class."""
    figures = behaviour.windows.current
    share = attainment(figures, slo.name) if figures is not None else None
    return share is not None and 100 * share >= slo.objective_percent


def _sentence(beyond: list[SLOClassSpec], reachable_s: float) -> Verdict:
    classes = " and ".join(f"{slo.name} ({slo.tpot})" for slo in beyond)
    return false(
        ConditionReason.INFEASIBLE,
        f"No request can meet the tpot of {classes}: by the latency profile the best that this hardware reaches, for "
        f"one request alone, is {time_text(reachable_s)}. Set tpot above it, or use a faster product or draft.",
    )


def _best_tpot_s(behaviour: MeasuredBehaviour, spec: SpeculativeServiceSpec, profile: ProductProfile) -> float | None:
    if profile.store.target is None or not profile.store.has_target(profile.keys):
        return None
    stored, speculation = profile.store.drafters, spec.speculation
    measured = {name: stored[key] for name, key in profile.keys.drafters.items() if key in stored}
    drafters = measured if speculation.mode is not SpeculationMode.OFF else {}
    return best_tpot_s(profile.store.target, drafters, _acceptance(behaviour), speculation.max_draft_tokens)


def _acceptance(behaviour: MeasuredBehaviour) -> dict[str, float]:
    """Acceptance rate by drafter name, for drafters with enough tokens in the window."""
    figures = behaviour.windows.current
    if figures is None:
        return {}
    return {name: d.accepted / d.tried for name, d in figures.gained.drafters.items() if d.tried >= LEAST_TOKENS}
