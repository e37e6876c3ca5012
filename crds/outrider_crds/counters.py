"""Counters: what pods count, declared once.

A counter is a field of a model: its name, its metric, its docstring. Its sum and its growth (`counter_sums`), its wire
form and its series in Prometheus follow from that.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from outrider_crds.counter_sums import Count, Counters, Sum
from outrider_crds.metrics import Group, Labelled, Metric

LEAST_SUM_S = 1e-9
"""Least divisor, in seconds: what is smaller is no quantity."""


# Upper bounds of the TPOT and TTFT histograms in seconds; fixed, so that pods' histograms can be added.
TPOT_BUCKETS_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.0625, 0.075, 0.1,
    0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0,
)  # fmt: skip
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 60.0)


class HistogramState(Counters):
    counts: list[int]
    """Observations per bucket, not cumulative. There is one bucket more than bounds, for values above all bounds."""
    sum_s: float = 0.0

    @classmethod
    def of(cls, bounds_s: tuple[float, ...], *values_s: float) -> Self:
        """The histogram of these values."""
        counts = [0] * (len(bounds_s) + 1)
        for value_s in values_s:
            counts[bisect_left(bounds_s, value_s)] += 1
        return cls(counts=counts, sum_s=sum(values_s))


def label_by_class(_model: Any, counts: dict[str, int]) -> list[Labelled]:
    """Series of a counter by SLO class."""
    return [((slo_class,), count) for slo_class, count in counts.items()]


class DrafterCounters(Counters):
    METRICS: ClassVar[Group] = Group(
        "Drafters", "All carry the label `drafter`: the name in `spec.draftPool`.", label="drafter"
    )
    request_steps: Annotated[int, Metric("outrider_drafter_request_steps_total")] = 0
    """(request, step) pairs in which at least one of its proposed tokens was verified."""
    tried: Annotated[int, Metric("outrider_drafter_tried_total")] = 0
    """Proposed tokens that were really tried: not those after the first rejection."""
    verified: Annotated[int, Metric("outrider_drafter_verified_total")] = 0
    """Proposed tokens that the target scored, tried or not."""
    accepted: Annotated[int, Metric("outrider_drafter_accepted_total")] = 0
    """Proposed tokens that were accepted. Accepted / tried is the acceptance rate."""


class SLOClassCounters(Counters):
    METRICS: ClassVar[Group] = Group(
        "SLO classes", "All carry the label `slo_class`: the name in `spec.sloClasses`.", label="slo_class"
    )
    finished: Annotated[int, Metric("outrider_slo_class_finished_total")] = 0
    """Requests with a verdict: those that finished, and those whose client left after TTFT or TPOT had passed, which
    are misses. A client that leaves before that is in neither this nor the next metric."""
    attained: Annotated[int, Metric("outrider_slo_class_attained_total")] = 0
    """Finished requests that met the class's TPOT, and its TTFT where it has one."""
    aborted: Annotated[int, Metric("outrider_slo_class_aborted_total")] = 0
    """Requests whose client left before the answer was complete, in time or not. vLLM cannot tell a client that leaves
    from an answer that ends at a stop string. So a request with stop strings counts as complete once it has a token."""
    output_tokens: Annotated[int, Metric("outrider_slo_class_output_tokens_total")] = 0
    """Output tokens of finished requests."""
    tpot: Annotated[HistogramState, Metric("outrider_slo_class_tpot_seconds", bounds_s=TPOT_BUCKETS_S)] = (
        HistogramState.of(TPOT_BUCKETS_S)
    )
    """Time per output token after the first, of each finished request; where its client left, what it had come to by
    then. The buckets are the same in every pod, so that they can be added."""
    ttft: Annotated[HistogramState, Metric("outrider_slo_class_ttft_seconds", bounds_s=TTFT_BUCKETS_S)] = (
        HistogramState.of(TTFT_BUCKETS_S)
    )
    """Time to the first token of each finished request; where its client left before that, how long it had waited."""


class AdapterCounters(Counters):
    METRICS: ClassVar[Group] = Group(
        "LoRA adapters", "All carry the label `adapter`: the name in `spec.adapters`.", label="adapter"
    )
    output_tokens: Annotated[int, Metric("outrider_adapter_output_tokens_total")] = 0
    """Output tokens of its requests that ended."""
    tried: Annotated[int, Metric("outrider_adapter_tried_total")] = 0
    """Proposed tokens of its requests that were really tried: not those after the first rejection."""
    accepted: Annotated[int, Metric("outrider_adapter_accepted_total")] = 0
    """Proposed tokens of its requests that were accepted. Accepted / tried is the acceptance rate."""
    finished: Annotated[
        dict[str, int], Metric("outrider_adapter_finished_total", labels=("slo_class",), series=label_by_class)
    ] = {}
    """Its requests with a verdict, as in `outrider_slo_class_finished_total`. Label `slo_class`: the request's class;
    requests without one are not counted here."""
    attained: Annotated[
        dict[str, int], Metric("outrider_adapter_attained_total", labels=("slo_class",), series=label_by_class)
    ] = {}
    """Requests among them that met the class. Label `slo_class`: the class."""


class SpeedupCounters(Counters):
    """Probes: blocks of k = 0 steps, compared with the steps around them that speculate."""

    METRICS: ClassVar[Group] = Group(
        "Measured speed-up",
        "A probe is a short block of steps without speculation, compared with the steps around it that speculate. "
        "Batches differ from step to step, so the latency model brings both to one measure. Probes are rare: the "
        "status counts them over five windows. From three on it shows a speed-up, once two standard errors tell it "
        "from 1.",
    )
    probes: Annotated[int, Metric("outrider_speedup_probes_total")] = 0
    """Probe blocks that were completed."""
    baseline_tokens: Annotated[int, Metric("outrider_speedup_baseline_tokens_total")] = 0
    """Tokens of the probe blocks."""
    baseline_s: Annotated[float, Metric("outrider_speedup_baseline_seconds_total")] = 0.0
    """Seconds of the probe blocks."""
    speculative_tokens: Annotated[int, Metric("outrider_speedup_speculative_tokens_total")] = 0
    """Tokens that steps with speculation would give in the seconds of the probe blocks."""
    speculative_s: Annotated[float, Metric("outrider_speedup_speculative_seconds_total")] = 0.0
    """Seconds that the speculative tokens are counted for: those of the probe blocks."""
    weight: Annotated[float, Metric("outrider_speedup_weight_total")] = 0.0
    """Sum of 1 / variance of the probes' ratios: goodput of steps that speculate / goodput of steps that do not."""
    weighted_ratio: Annotated[float, Metric("outrider_speedup_weighted_ratio_total")] = 0.0
    """Sum of the ratios, each times its weight."""


def _label_by_length(_state: Any, counts: list[int]) -> list[Labelled]:
    return [((str(length),), count) for length, count in enumerate(counts)]


class StepCounters(Counters):
    """Counters of a pod that are kept by no name."""

    METRICS: ClassVar[Group] = Group("The pod and its engine's steps")
    steps: Annotated[int, Metric("outrider_steps_total")] = 0
    """Engine steps that ran the model."""
    speculative_steps: Annotated[int, Metric("outrider_speculative_steps_total")] = 0
    """Engine steps in which drafters ran, whether they had proposals or not."""
    output_tokens: Annotated[int, Metric("outrider_output_tokens_total")] = 0
    """Tokens that reached users. Its rate is the goodput."""
    busy_s: Annotated[float, Metric("outrider_busy_seconds_total")] = 0.0
    """Seconds spent in engine steps."""
    batch_squared: Annotated[int, Metric("outrider_batch_squared_total")] = 0
    """Sum over steps of the square of the requests that decoded. With the next three it tells how a step's tokens
    and seconds grow with the batch."""
    batch_accepted: Annotated[int, Metric("outrider_batch_accepted_total")] = 0
    """Sum over steps of the requests that decoded x the step's accepted tokens."""
    batch_busy_s: Annotated[float, Metric("outrider_batch_busy_seconds_total")] = 0.0
    """Sum over steps of the requests that decoded x the step's seconds without those of prompts."""
    prompt_busy_s: Annotated[float, Metric("outrider_prompt_busy_seconds_total")] = 0.0
    """Seconds that prompts took, by the model of step times: all of a step in which no request decoded."""
    proposed_tokens: Annotated[int, Metric("outrider_proposed_tokens_total")] = 0
    """Tokens drafted, whether or not the target verified them."""
    draft_length_steps: Annotated[
        list[int],
        Metric("outrider_draft_length_request_steps_total", labels=("draft_tokens",), series=_label_by_length),
    ] = []
    """(request, step) pairs that verified so many proposed tokens. Label `draft_tokens`: "0", "1", ... up to
    `maxDraftTokens` at boot."""
    dropped_steps: Annotated[int, Metric("outrider_dropped_steps_total")] = 0
    """Step times that were ignored: NaN, negative, or absurd as after a machine was suspended (over a second, and over
    eight times what was predicted or outside the models' passes)."""
    loop_failures: Annotated[int, Metric("outrider_loop_failures_total")] = 0
    """Times that the control loop itself raised. Each costs a step its drafts, and no request its answer; three within
    a minute suspend the drafters."""
    broken_answers: Annotated[int, Metric("outrider_broken_answers_total")] = 0
    """Requests that ended with an error since the engine computed NaN or infinity for them: an adapter, the target's
    weights or the device is faulty. If all requests are like that, the pod restarts."""
    decision_s: Annotated[float, Metric("outrider_decision_seconds_total")] = 0.0
    """Seconds spent deciding. Divide by `outrider_steps_total` for the cost of a decision."""
    caught_up_tokens: Annotated[int, Metric("outrider_caught_up_tokens_total")] = 0
    """Tokens of catch-up: a draft model prefills its KV gaps, so that running requests are drafted for again after a
    time without it."""
    catch_up_s: Annotated[float, Metric("outrider_catch_up_seconds_total")] = 0.0
    """Seconds that the catch-up took, as measured on the device."""
    speedup: SpeedupCounters = SpeedupCounters()


class ArmCounters(Counters):
    """Sums over the finished requests of one arm of a canary. A request whose client left counts with what it got. A
    request does not count that ran while speculation was off, or while a drafter of either arm could not run."""

    METRICS: ClassVar[Group] = Group(
        "Draft canary",
        "While a pod compares two pools of drafters. All carry the label `arm`: `stable` or `candidate`. They start "
        "from 0 with another attempt. Plain / price is an arm's speed-up. Seconds are weighted so that both arms have "
        "the same mix of batch sizes.",
        label="arm",
    )
    requests: Annotated[Count, Metric("outrider_canary_requests_total")] = 0
    """Finished requests with a decoding step, or whose prompt a drafter prefilled."""
    tokens: Annotated[Count, Metric("outrider_canary_tokens_total")] = 0
    """Output tokens of their decoding steps, bonus tokens included; the token that ends a prompt is not one of them."""
    plain_s: Annotated[Sum, Metric("outrider_canary_plain_seconds_total")] = 0.0
    """Seconds that plain decoding would have taken for these tokens: T_target(N, 0) / N for each token, in the batch of
    its step. By the latency model as corrected online. Plain / price is the arm's speed-up."""
    speculated_s: Annotated[Sum, Metric("outrider_canary_speculated_seconds_total")] = 0.0
    """Plain seconds of the steps in which the request had proposals, or a drafter of its arm ran."""
    price_s: Annotated[Sum, Metric("outrider_canary_price_seconds_total")] = 0.0
    """Seconds of their decoding steps, as if all N requests of a step were of this arm. For each request and step it is
    (T_target(N, verified) + sum of T_draft(N) over the drafters that ran) / N, by the latency model as corrected
    online."""
    batch_steps: Annotated[list[Count], Field(max_length=32)] = []
    """Decoding steps, counted once for each of their requests, by requests in the step: 1, 2 to 3, 4 to 7 and so on."""
    plain_squared: Sum = 0.0
    """Sum of each request's plain seconds squared."""
    price_squared: Sum = 0.0
    """Sum of each request's price squared, in seconds squared."""
    plain_times_price: Sum = 0.0
    """Sum of each request's plain seconds times its price, in seconds squared."""
    failures: Annotated[Count, Metric("outrider_canary_failures_total")] = 0
    """Times that a drafter was suspended after an error: the one that fails most often, of those in this arm alone."""
    finished: Annotated[
        dict[str, Count], Metric("outrider_canary_finished_total", labels=("slo_class",), series=label_by_class)
    ] = {}
    """Finished requests with a verdict. Label `slo_class`: the request's class; requests without one are not counted
    here."""
    attained: Annotated[
        dict[str, Count], Metric("outrider_canary_attained_total", labels=("slo_class",), series=label_by_class)
    ] = {}
    """Requests among them that met the class. Label `slo_class`: the class."""

    @property
    def effective_requests(self) -> float:
        """Requests of equal price that would tell as much as these (Kish's effective size)."""
        squares = self.requests * self.price_squared
        return self.requests * min(1.0, self.price_s**2 / squares) if squares > 0.0 else self.requests

    @property
    def speculated_share(self) -> float:
        """Share of the plain seconds in which the arm speculated."""
        return self.speculated_s / self.plain_s if self.plain_s >= LEAST_SUM_S else 0.0

    @property
    def speedup(self) -> float | None:
        """Seconds of plain decoding / seconds of price; None before any."""
        return self.plain_s / self.price_s if min(self.plain_s, self.price_s) >= LEAST_SUM_S else None
