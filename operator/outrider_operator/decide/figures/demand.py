"""Estimate the replicas that a service's load needs at its SLO, from the latency profile and a window's figures.

The profile tells how step time grows with the batch. The window tells the real step time at the current batch, with
contexts, prefill and drafters, how it grew with the batch, and the tokens per step. A value that was not measured is
absent, not 0.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from outrider_crds.base import seconds
from outrider_crds.profile import ProfileExecutionMode, ProfileStepCost, TargetProfile
from outrider_crds.runtime_state import ServiceCounters
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import DemandStatus

from outrider_operator.decide.figures.samples import LEAST_TOKENS, three_digits
from outrider_operator.decide.profiling.product_profiles import ProductProfile
from outrider_operator.figure_windows import WindowCounts

_MOST_REQUESTS = 256
"""Largest batch for profiles of older releases, which do not record theirs."""
_MOST_OFF = 8.0
"""Largest ratio of measured / predicted step time, or its inverse. Beyond it the profile is of another machine."""
_MOST_TOKENS = 2.0
"""Most by which the tokens of a step may exceed the window's: no small batch makes up for a TPOT that none keeps."""
_MOST_BATCH = 4096
"""Most requests that decode in a step. A pod that reports more counts something else."""
_NO_SPREAD, _FULL_SPREAD = 0.01, 0.04
"""(Standard deviation / mean of the batch)^2 up to which slopes do not count, since noise would be taken for them, and
from which they count fully. In between their weight grows, so that demand does not jump where batches vary as much."""


@dataclass(frozen=True)
class Slopes:
    """What a further request in a step added to it, by least squares over the steps of a window."""

    step_s: float
    """Prompts' seconds are left out: they come when they come, whatever the batch."""
    tokens: float
    weight: float = 1.0
    """Share to which the slopes count, from 0 to 1; the rest is what is assumed without them."""


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
    slopes: Slopes | None = None
    """None if they were not measured, or all steps had about the same batch."""
    prompts_s: float = 0.0
    """Seconds of prompts in the mean step, a part of `step_s`."""


@dataclass(frozen=True)
class Capacity:
    """Capacity of one pod at the SLO."""

    requests: int
    tokens_per_s: float
    replicas: float
    """Pods that the load needs."""


def demand(
    spec: SpeculativeServiceSpec, figures: WindowCounts | None, profiles: list[ProductProfile]
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


def load_of(figures: WindowCounts | None) -> Load | None:
    """Load in the window; None if no pod answered."""
    if figures is None or not figures.pods_answered or not figures.pods_ready:
        return None
    counted, tokens_per_step = figures.gained, figures.rare.tokens_per_step
    rate = counted.output_tokens / figures.window_s * figures.pods_ready / figures.pods_answered
    if counted.output_tokens < LEAST_TOKENS or not counted.request_steps or counted.steps < 1:
        return Load(rate, tokens_per_step=1.0, batch=1.0, step_s=0.0)
    batch = max(1.0, counted.request_steps / counted.steps)
    step_s = counted.busy_s / counted.steps
    prompts_s = min(counted.prompt_busy_s / counted.steps, step_s)
    return Load(rate, max(1.0, tokens_per_step), batch, step_s, _slopes(counted), prompts_s)


def _slopes(counted: ServiceCounters) -> Slopes | None:
    """Slopes of a step's seconds and tokens by its batch `b`: `(n Sby - Sb Sy) / (n Sbb - Sb Sb)` over `n` steps."""
    steps, requests = counted.steps, counted.request_steps
    spread = steps * counted.batch_squared - requests * requests
    weight = (spread / (requests * requests) - _NO_SPREAD) / (_FULL_SPREAD - _NO_SPREAD)
    if weight <= 0:
        return None
    return Slopes(
        step_s=(steps * counted.batch_busy_s - requests * (counted.busy_s - counted.prompt_busy_s)) / spread,
        tokens=1 + (steps * counted.batch_accepted - requests * counted.accepted) / spread,
        weight=min(1.0, weight),
    )


def capacity(profile: TargetProfile, load: Load, tpot_s: float) -> Capacity | None:
    """Capacity at the largest batch `B` whose time per token meets `tpot_s`; None if none does or the profile is wrong.

    `E(B)` is tokens per step of a request, `T(B)` the step's seconds; both are measured at the window's batch. The
    condition is `T(B) / E(B) <= tpot_s`, and a pod yields `B * E(B) / T(B)` tokens per second. If steps take longer
    than `T(B)`, requests queue: by Little's law there are `tokens_per_s * step_s / E`, and a pod takes `B`.
    """
    cost = profile.costs.get(ProfileExecutionMode.UNIFORM) or next(iter(profile.costs.values()))
    if load.batch > _MOST_BATCH or not _is_plausible(cost, load):
        return None
    batches = range(1, (profile.most_requests or _MOST_REQUESTS) + 1)
    requests = bisect_right(batches, tpot_s, key=lambda batch: _pass_s(cost, load, batch) / _tokens(load, batch))
    if not requests:
        return None
    tokens_per_s = requests * _tokens(load, requests) / _pass_s(cost, load, requests)
    queued = load.tokens_per_s * load.step_s / (load.tokens_per_step * requests)
    return Capacity(requests, tokens_per_s, max(load.tokens_per_s / tokens_per_s, queued))


def _is_plausible(cost: ProfileStepCost, load: Load) -> bool:
    """Whether steps take roughly what the profile says, which knows no prompts: under overload they take most."""
    if cost.without_context_s(1, 1) <= 0:
        return False
    predicted_s = cost.without_context_s(load.batch, load.tokens_per_step)
    slow, fast = (load.step_s - load.prompts_s) / predicted_s, load.step_s / predicted_s
    return not load.step_s or (slow <= _MOST_OFF and fast >= 1 / _MOST_OFF)


def _tokens(load: Load, batch: float) -> float:
    """Tokens of a request in a step of `batch`: `(E * b + slope * (batch - b)) / batch` around the window's `b`.

    The loop drafts less for larger batches, so the slope is below `E`. A further request has at least one token.
    """
    tokens = load.tokens_per_step
    if load.slopes is None:
        return tokens
    slope = tokens + load.slopes.weight * (min(max(1.0, load.slopes.tokens), tokens) - tokens)
    return min(slope + (tokens - slope) * load.batch / batch, _MOST_TOKENS * tokens)


def _pass_s(cost: ProfileStepCost, load: Load, batch: float) -> float:
    """Seconds of a step of `batch`: the profile's plus what the window's steps took above it, their excess.

    In part requests bring it along, contexts and prompts; in part it is every step's: a slower host, a drafter's
    passes. For a smaller batch it is taken to shrink with the batch: the profile is then right without requests, and a
    load past the SLO has a demand. For a larger one it grows by the window's slope less the profile's, plus the share
    of prompts that a request brings, to as much as the requests bring if all of it is theirs, which holds without
    a slope. Steps faster than their profile are faster by the same factor at each batch.
    """
    profiled_s = cost.without_context_s(batch, _tokens(load, batch))
    predicted_s = cost.without_context_s(load.batch, load.tokens_per_step)
    excess_s = load.step_s - predicted_s if load.step_s else 0.0
    if excess_s < 0:
        return profiled_s * load.step_s / predicted_s
    growth_s = excess_s / load.batch
    if batch > load.batch and load.slopes is not None:
        profiled_growth_s = cost.without_context_s(load.batch + 1, _tokens(load, load.batch + 1)) - predicted_s
        measured_s = max(0.0, load.slopes.step_s - profiled_growth_s) + load.prompts_s / load.batch
        growth_s += load.slopes.weight * (min(measured_s, growth_s) - growth_s)
    return profiled_s + excess_s + growth_s * (batch - load.batch)


def _tightest_tpot_s(spec: SpeculativeServiceSpec, figures: WindowCounts | None) -> float | None:
    """Lowest TPOT, in seconds, of the classes with finished requests in the window; of all classes if none has any."""
    classes = figures.gained.slo_classes if figures is not None else {}
    busy = [slo for slo in spec.slo_classes if slo.name in classes and classes[slo.name].finished > 0]
    return min((seconds(slo.tpot) for slo in busy or spec.slo_classes), default=None)
