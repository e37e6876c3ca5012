"""Figures in the status: goodput, SLO classes, drafts, and the columns that people watch.

Each column has a figure, or says in a word why it has none.
"""

from __future__ import annotations

from outrider_crds.counters import TPOT_BUCKETS_S, DrafterCounters
from outrider_crds.runtime_state import DrafterReport
from outrider_crds.spec import SpeculationMode, SpeculativeServiceSpec
from outrider_crds.status import DraftStatus, GoodputStatus, SLOClassStatus, Summary

from outrider_operator.decide.figures.samples import (
    LEAST_TOKENS,
    USED_SHARE,
    MeasuredBehaviour,
    Speedup,
    attainment,
    bytes_text,
    percentile_s,
    rounded,
    speedup,
    three_digits,
    time_text,
    used_share,
)
from outrider_operator.decide.profiling.product_profiles import ProductProfile
from outrider_operator.figure_windows import WindowCounts

_MEASURED = {"acceptance_rate", "accepted_length", "share_percent"}
UNKNOWN, IDLE, MEASURING, OFF, PLAIN, NEAR_ONE = "unknown", "idle", "measuring", "off", "plain", "near 1x"
"""Nothing answers; fewer than 50 tokens in the window; too few samples yet; no drafter may run; requests decode without
speculation at this load; the speed-up does not differ from 1 beyond noise."""


def goodput(figures: WindowCounts | None) -> GoodputStatus | None:
    if figures is None:
        return None
    rate, gain = figures.gained.output_tokens / figures.window_s, _significant_speedup(figures)
    return GoodputStatus(
        tokens_per_second=three_digits(rate),
        baseline_tokens_per_second=three_digits(rate / gain.value) if gain else "",
        speedup=three_digits(gain.value) if gain else "",
        speedup_range=f"{three_digits(gain.low)}-{three_digits(gain.high)}" if gain else "",
        window=f"{round(figures.window_s / 5) * 5 or round(figures.window_s)}s",
        tokens=rounded(figures.gained.output_tokens),
        pods=f"{figures.pods_answered}/{figures.pods_ready}",
    )


def _significant_speedup(figures: WindowCounts) -> Speedup | None:
    """The speed-up of a window with traffic; None until it differs significantly from 1."""
    gain = speedup(figures) if figures.gained.output_tokens >= LEAST_TOKENS else None
    return gain if gain is not None and gain.is_significant else None


def slo_classes(spec: SpeculativeServiceSpec, figures: WindowCounts | None) -> list[SLOClassStatus]:
    return [_slo_class(slo.name, figures) for slo in spec.slo_classes]


def drafts(
    behaviour: MeasuredBehaviour, spec: SpeculativeServiceSpec, profiles: list[ProductProfile]
) -> list[DraftStatus]:
    return [_draft(behaviour, profiles, drafter.name) for drafter in spec.draft_pool]


def _slo_class(name: str, figures: WindowCounts | None) -> SLOClassStatus:
    slo = figures.gained.slo_classes.get(name) if figures is not None else None
    if slo is None or slo.finished <= 0:
        return SLOClassStatus(name=name, aborted=rounded(slo.aborted) if slo is not None else 0)

    def quantile(share: float) -> str:
        value = percentile_s(slo.tpot.counts, TPOT_BUCKETS_S, share)
        return time_text(value) if value is not None else ""

    return SLOClassStatus(
        name=name,
        attainment_percent=three_digits(100 * slo.attained / slo.finished),
        tpot_p50=quantile(0.5),
        tpot_p99=quantile(0.99),
        requests=rounded(slo.finished),
        aborted=rounded(slo.aborted),
    )


def _draft(behaviour: MeasuredBehaviour, profiles: list[ProductProfile], name: str) -> DraftStatus:
    reports = [drafter for state in behaviour.states.values() for drafter in state.drafters if drafter.name == name]
    last = next((draft for draft in behaviour.last_status.drafts if draft.name == name), None)
    kept = last if behaviour.between_windows else None
    return DraftStatus(
        name=name,
        kind=next((report.kind for report in reports if report.kind), ""),
        profiled=bool(profiles)
        and all(profile.keys.drafters.get(name) in profile.store.drafters for profile in profiles),
        loaded=bool(reports) and all(report.loaded for report in reports),
        reason=_reason(profiles, name, reports),
        memory=_memory(reports),
        **(_measured(behaviour.windows.current, name) if kept is None else kept.model_dump(include=_MEASURED)),
    )


def _reason(profiles: list[ProductProfile], name: str, reports: list[DrafterReport]) -> str:
    """Why a drafter is not in use: the message of a pod, or of the Job that could not measure it."""
    reasons = sorted({report.reason for report in reports if report.reason})
    failures = [
        failure for profile in profiles if (failure := profile.failure(profile.keys.drafters.get(name, ""))) is not None
    ]
    return reasons[0] if reasons else failures[0].message if failures else ""


def _memory(reports: list[DrafterReport]) -> str:
    """Memory of a drafter in the pod where it costs most concurrency."""
    memories = [report.memory for report in reports if report.memory is not None]
    if not memories:
        return ""
    memory = max(memories, key=lambda memory: (memory.concurrency_percent, memory.weight_bytes))
    weights, token = bytes_text(memory.weight_bytes), bytes_text(memory.kv_bytes_per_token)
    return f"{weights} of weights and {token} a token cost {three_digits(memory.concurrency_percent)}% of concurrency"


def _measured(figures: WindowCounts | None, name: str) -> dict[str, str]:
    if figures is None:
        return {}
    window = figures.gained.drafters.get(name, DrafterCounters())
    sample = window if window.tried >= LEAST_TOKENS else figures.rare.drafters.get(name, window)
    if sample.tried < 1 or sample.request_steps < 1:
        return {}
    return {
        "acceptance_rate": three_digits(sample.accepted / sample.tried),
        "accepted_length": three_digits(1 + sample.accepted / sample.request_steps),
        "share_percent": three_digits(100 * window.request_steps / max(figures.gained.request_steps, 1.0)),
    }


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
        speedup=_speedup_column(spec, figures, behaviour),
        acceptance=_acceptance_column(spec, figures),
        slo=_worst_class(spec, figures) or _no_figure(figures),
    )


def _no_figure(figures: WindowCounts) -> str:
    return IDLE if figures.gained.output_tokens < LEAST_TOKENS else MEASURING


def _is_off(spec: SpeculativeServiceSpec) -> bool:
    return spec.speculation.mode is SpeculationMode.OFF or all(drafter.paused for drafter in spec.draft_pool)


def _speedup_column(spec: SpeculativeServiceSpec, figures: WindowCounts, behaviour: MeasuredBehaviour) -> str:
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


def _acceptance_column(spec: SpeculativeServiceSpec, figures: WindowCounts) -> str:
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
