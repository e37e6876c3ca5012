"""Estimate the replicas that a service's load needs at its SLO, from the latency profile and a window's figures.

The profile tells how step time grows with the batch. The window tells the real step time at the current batch, with
contexts, prefill and drafters, and the tokens per step. A value that was not measured is absent, not 0.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from outrider_crds.base import seconds
from outrider_crds.profile import ProfileExecutionMode, ProfileStepCost, TargetProfile
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import DemandStatus

from outrider_operator.cluster_model import WindowFigures
from outrider_operator.decide.figures.numbers import three_digits
from outrider_operator.decide.figures.samples import LEAST_TOKENS
from outrider_operator.decide.profiling.product_profiles import ProductProfile

_MOST_REQUESTS = 256
"""Largest batch for profiles of older releases, which do not record theirs."""
_MOST_OFF = 8.0
"""Largest ratio of measured / predicted step time, or its inverse. Beyond it the profile is of another machine."""


@dataclass(frozen=True)
class Load:
    """Load of a service in a window."""

    tokens_per_s: float
    """Tokens per second of all ready pods. Pods that did not answer count like the others."""
    tokens_per_step: float
    """Tokens of a request in a step, including the bonus token."""
    batch: float
    """Requests that decode in a step."""
    step_s: float
    """Mean duration of a step; 0 if there were too few steps."""


@dataclass(frozen=True)
class Capacity:
    """Capacity of one pod at the SLO."""

    requests: int
    tokens_per_s: float
    replicas: float
    """Pods that the load needs."""


def demand(
    spec: SpeculativeServiceSpec, figures: WindowFigures | None, profiles: list[ProductProfile]
) -> list[DemandStatus]:
    """One entry for each product that can meet the SLO according to its profile."""
    tpot_s = _tightest_tpot_s(spec, figures)
    load = load_of(figures)
    if load is None or tpot_s is None:
        return []
    measured = [(entry.keys.product, entry.store.target) for entry in profiles if entry.store.has_target(entry.keys)]
    pods = [(product, capacity(profile, load, tpot_s)) for product, profile in measured if profile is not None]
    return [
        DemandStatus(
            product=product,
            replicas=three_digits(pod.replicas),
            requests=pod.requests,
            tokens_per_second=three_digits(pod.tokens_per_s),
        )
        for product, pod in pods
        if pod is not None
    ]


def load_of(figures: WindowFigures | None) -> Load | None:
    """Load in the window; None if no pod answered."""
    if figures is None or not figures.pods_answered or not figures.pods_ready:
        return None
    rate = figures.output_tokens / figures.window_s * figures.pods_ready / figures.pods_answered
    if figures.output_tokens < LEAST_TOKENS or not figures.request_steps or not figures.busy_steps:
        return Load(rate, tokens_per_step=1.0, batch=1.0, step_s=0.0)
    batch = max(1.0, figures.request_steps / figures.busy_steps)
    return Load(rate, max(1.0, figures.tokens_per_step), batch, figures.busy_s / figures.busy_steps)


def capacity(profile: TargetProfile, load: Load, tpot_s: float) -> Capacity | None:
    """Capacity at the largest batch `B` whose time per token meets `tpot_s`; None if none does or the profile is wrong.

    `E` is tokens per step of a request. `T(B)` is the profile's step time, scaled by measured / predicted at the
    current batch. The condition is `T(B) / E <= tpot_s`, and a pod yields `B * E / T(B)` tokens per second. If steps
    take longer than `T(B)`, requests queue: by Little's law there are `tokens_per_s * step_s / E`, and a pod takes `B`.
    """
    cost = profile.costs.get(ProfileExecutionMode.UNIFORM) or next(iter(profile.costs.values()))
    predicted_s = _step_s(cost, load.batch, load.tokens_per_step)
    ratio = load.step_s / predicted_s if load.step_s else 1.0
    if not 1 / _MOST_OFF <= ratio <= _MOST_OFF:
        return None
    batches = range(1, (profile.most_requests or _MOST_REQUESTS) + 1)

    def pass_s(batch: int) -> float:
        return ratio * _step_s(cost, batch, load.tokens_per_step)

    requests = bisect_right(batches, tpot_s * load.tokens_per_step, key=pass_s)
    if not requests:
        return None
    tokens_per_s = requests * load.tokens_per_step / pass_s(requests)
    slower_s = max(pass_s(requests), load.step_s)
    return Capacity(requests, tokens_per_s, load.tokens_per_s * slower_s / (load.tokens_per_step * requests))


def _step_s(cost: ProfileStepCost, batch: float, tokens: float) -> float:
    """Seconds of a step without context for `batch` requests with `tokens` tokens each."""
    return cost.without_context_s(batch, tokens)


def _tightest_tpot_s(spec: SpeculativeServiceSpec, figures: WindowFigures | None) -> float | None:
    """Lowest TPOT, in seconds, of the classes with finished requests in the window; of all classes if none has any."""
    classes = figures.slo_classes if figures is not None else {}
    busy = [slo for slo in spec.slo_classes if slo.name in classes and classes[slo.name].finished > 0]
    return min((seconds(slo.tpot) for slo in busy or spec.slo_classes), default=None)
