"""Replicas that a service's load takes at its SLO, from profile, live acceptance and load.

The profile says how a step's time grows with the batch; the window says how long steps really take at the batch of
now, contexts, prompts and drafters included, and how many tokens each brings. What was not measured is absent, not 0.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from outrider_crds.base import seconds
from outrider_crds.profile import ExecutionMode, StepCost, TargetProfile
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import DemandStatus

from outrider_operator.decide.figures.numbers import three_digits
from outrider_operator.decide.figures.samples import LEAST_TOKENS
from outrider_operator.decide.profiling.product_profiles import ProductProfile
from outrider_operator.model import Figures

_MOST_REQUESTS = 256
"""A batch for profiles of releases that did not tell how large theirs was."""
_MOST_OFF = 8.0
"""Measured / predicted step time, or its inverse, from which on the profile is another machine's."""


@dataclass(frozen=True)
class Load:
    """What a service did in a window."""

    tokens_per_s: float
    """Tokens of all ready pods; those that did not answer count as the others."""
    tokens_per_step: float
    """Tokens of a request in a step, the bonus token included."""
    batch: float
    """Requests that decode in a step."""
    step_s: float
    """Mean duration of a step; 0 where too little ran to tell."""


@dataclass(frozen=True)
class Capacity:
    """What a pod can do at the SLO."""

    requests: int
    tokens_per_s: float
    replicas: float
    """Pods that the load takes."""


def demand(spec: SpeculativeServiceSpec, figures: Figures | None, profiles: list[ProductProfile]) -> list[DemandStatus]:
    """One entry for each product whose profile says that it can keep the SLO."""
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


def load_of(figures: Figures | None) -> Load | None:
    """None without pods that answered: no load is known then."""
    if figures is None or not figures.pods_answered or not figures.pods_ready:
        return None
    rate = figures.output_tokens / figures.window_s * figures.pods_ready / figures.pods_answered
    if figures.output_tokens < LEAST_TOKENS or not figures.request_steps or not figures.busy_steps:
        return Load(rate, tokens_per_step=1.0, batch=1.0, step_s=0.0)
    batch = max(1.0, figures.request_steps / figures.busy_steps)
    return Load(rate, max(1.0, figures.tokens_per_step), batch, figures.busy_s / figures.busy_steps)


def capacity(profile: TargetProfile, load: Load, tpot_s: float) -> Capacity | None:
    """The largest batch `B` whose time per token keeps `tpot_s`; None where none does, or the profile does not fit.

    `E` is the tokens of a request in a step, `T(B)` the profile's step time times measured / predicted at the present
    batch: `T(B) / E <= tpot_s`. A pod gives `B * E / T(B)`. Where steps take longer than `T(B)`, requests pile up, and
    by Little's law they are `tokens_per_s * step_s / E`, of which a pod takes `B`.
    """
    cost = profile.costs.get(ExecutionMode.UNIFORM) or next(iter(profile.costs.values()))
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


def _step_s(cost: StepCost, batch: float, tokens: float) -> float:
    """Seconds of a step without context, of `batch` requests with `tokens` tokens each."""
    return cost.without_context_s(batch, tokens)


def _tightest_tpot_s(spec: SpeculativeServiceSpec, figures: Figures | None) -> float | None:
    """Seconds; of the classes with requests in the window, or of all where none has finished one."""
    classes = figures.slo_classes if figures is not None else {}
    busy = [slo for slo in spec.slo_classes if slo.name in classes and classes[slo.name].finished > 0]
    return min((seconds(slo.tpot) for slo in busy or spec.slo_classes), default=None)
