"""SLO classes that no request can meet on this hardware, by its latency profile."""

from __future__ import annotations

from outrider_crds.base import seconds
from outrider_crds.spec import SLOClass, SpeculationMode, SpeculativeServiceSpec
from outrider_crds.status import ConditionType, Reason

from outrider_operator.decide.conditions.verdict import Verdict, false
from outrider_operator.decide.figures.behaviour import Behaviour
from outrider_operator.decide.figures.latency import best_tpot_s
from outrider_operator.decide.figures.numbers import time_text
from outrider_operator.decide.figures.samples import LEAST_TOKENS, attainment
from outrider_operator.decide.profiling.product_profiles import ProductProfile

_MARGIN = 0.9
"""A class counts as out of reach below this share of the best value, and again in reach only above it all."""


def infeasible(behaviour: Behaviour, spec: SpeculativeServiceSpec, found: list[ProductProfile]) -> Verdict | None:
    """False when a class asks for less time per token than any product can reach; None while one is unmeasured."""
    best = [value for each in found if (value := _best_tpot_s(behaviour, spec, each)) is not None]
    if len(best) < len(found) or not best:
        return None
    reachable_s = min(best)
    limit_s = reachable_s * (1.0 if _stands(behaviour) else _MARGIN)
    beyond = [slo for slo in spec.slo_classes if seconds(slo.tpot) < limit_s and not _is_met(behaviour, slo)]
    return _sentence(beyond, reachable_s) if beyond else None


def _stands(behaviour: Behaviour) -> bool:
    standing = behaviour.standing_condition(ConditionType.SLO_ATTAINED)
    return standing is not None and standing.reason == Reason.INFEASIBLE


def _is_met(behaviour: Behaviour, slo: SLOClass) -> bool:
    """Requests do meet it: then the profile is wrong, not the class."""
    figures = behaviour.windows.current
    share = attainment(figures, slo.name) if figures is not None else None
    return share is not None and 100 * share >= slo.objective_percent


def _sentence(beyond: list[SLOClass], reachable_s: float) -> Verdict:
    asked = " and ".join(f"{slo.name} ({slo.tpot})" for slo in beyond)
    return false(
        Reason.INFEASIBLE,
        f"No request can meet the tpot of {asked}: by the latency profile the best that this hardware reaches, for "
        f"one request alone, is {time_text(reachable_s)}. Set tpot above it, or use a faster product or draft.",
    )


def _best_tpot_s(behaviour: Behaviour, spec: SpeculativeServiceSpec, each: ProductProfile) -> float | None:
    if each.store.target is None or not each.store.has_target(each.keys):
        return None
    stored, speculation = each.store.drafters, spec.speculation
    measured = {name: stored[key] for name, key in each.keys.drafters.items() if key in stored}
    drafters = measured if speculation.mode is not SpeculationMode.OFF else {}
    return best_tpot_s(each.store.target, drafters, _acceptance(behaviour), speculation.max_draft_tokens)


def _acceptance(behaviour: Behaviour) -> dict[str, float]:
    """By drafter, where the window tried enough tokens."""
    figures = behaviour.windows.current
    if figures is None:
        return {}
    return {name: d.accepted / d.tried for name, d in figures.drafters.items() if d.tried >= LEAST_TOKENS}
