"""The columns that people watch: each has a figure, or says in a word why it has none."""

from __future__ import annotations

from outrider_crds.counters import DrafterCounters
from outrider_crds.spec import SpeculationMode, SpeculativeServiceSpec
from outrider_crds.status import Summary

from outrider_operator.cluster_model import WindowCounts
from outrider_operator.decide.figures.behaviour import MeasuredBehaviour
from outrider_operator.decide.figures.numbers import three_digits
from outrider_operator.decide.figures.samples import LEAST_TOKENS, USED_SHARE, attainment, speedup, used_share

UNKNOWN, IDLE, MEASURING, OFF, PLAIN, NEAR_ONE = "unknown", "idle", "measuring", "off", "plain", "near 1x"
"""Nothing answers; fewer than 50 tokens in the window; too few samples yet; no drafter may run; requests decode without
speculation at this load; the speed-up does not differ from 1 beyond noise."""


def summary(spec: SpeculativeServiceSpec, behaviour: MeasuredBehaviour) -> Summary | None:
    """Figures or words for the columns; None while no pod serves."""
    figures = behaviour.windows.current
    if figures is None and not behaviour.is_served:
        return None
    if figures is None:
        word = UNKNOWN if behaviour.windows.error else MEASURING
        return Summary(goodput=word, speedup=_of_canary(behaviour) or word, acceptance=word, slo=word)
    return Summary(
        goodput=f"{three_digits(figures.gained.output_tokens / figures.window_s)} tok/s",
        speedup=_speedup(spec, figures, behaviour),
        acceptance=_acceptance(spec, figures),
        slo=_worst_class(spec, figures) or _no_figure(figures),
    )


def _no_figure(figures: WindowCounts) -> str:
    return IDLE if figures.gained.output_tokens < LEAST_TOKENS else MEASURING


def _is_off(spec: SpeculativeServiceSpec) -> bool:
    return spec.speculation.mode is SpeculationMode.OFF or all(drafter.paused for drafter in spec.draft_pool)


def _speedup(spec: SpeculativeServiceSpec, figures: WindowCounts, behaviour: MeasuredBehaviour) -> str:
    """The probes' speed-up; before they tell one, that of the canary which has just measured this pool."""
    if _is_off(spec):
        return OFF
    has_traffic = figures.gained.output_tokens >= LEAST_TOKENS
    gain = speedup(figures) if has_traffic else None
    if gain is not None:
        return f"{three_digits(gain.value)}x" if gain.is_significant else NEAR_ONE
    if has_traffic and used_share(figures) < USED_SHARE:
        return PLAIN
    return _of_canary(behaviour) or _no_figure(figures)


def _of_canary(behaviour: MeasuredBehaviour) -> str:
    """Speed-up of the candidate that the pods run now, as its canary measured it; empty for another pool."""
    rollout = behaviour.last_status.rollout
    if rollout is None or all(state.revision != rollout.candidate for state in behaviour.states.values()):
        return ""
    measured = next((arm.speedup for arm in rollout.arms if arm.name == "candidate"), "")
    return f"{measured}x in canary" if measured else ""


def _acceptance(spec: SpeculativeServiceSpec, figures: WindowCounts) -> str:
    """Acceptance rate in the window; where that tried few tokens, in the longer one."""
    if _is_off(spec):
        return OFF
    for counted in (figures.gained, figures.rare):
        total = sum(counted.drafters.values(), DrafterCounters())
        if total.tried >= LEAST_TOKENS:
            return f"{three_digits(100 * total.accepted / total.tried)}%"
    return _no_figure(figures)


def _worst_class(spec: SpeculativeServiceSpec, figures: WindowCounts) -> str:
    """The class furthest below (or least above) its objective."""
    shares = [
        (100 * share - slo.objective_percent, slo.name, share)
        for slo in spec.slo_classes
        if (share := attainment(figures, slo.name)) is not None
    ]
    if not shares:
        return "" if spec.slo_classes else "no classes"
    _, name, share = min(shares)
    return f"{three_digits(100 * share)}% {name}"
