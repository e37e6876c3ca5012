"""The state that a pod returns at `GET /outrider/state` (admin port): versioned JSON with counters.

Counters grow from the start of the process, so a reader takes differences over its own window and sums them over pods.
`started_at` tells when a process is a new one. The Prometheus metrics come from the same document: each field names its
metric (see `metrics`).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from outrider_crds.base import Model
from outrider_crds.contract import Contract
from outrider_crds.counters import ArmCounters, by_class
from outrider_crds.metrics import Group, Labelled, Metric

STATE_SCHEMA = 1

# Upper bounds of the TPOT and TTFT histograms in seconds; fixed, so that pods' histograms can be added.
TPOT_BUCKETS_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.0625, 0.075, 0.1,
    0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0,
)  # fmt: skip
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 60.0)


class ProfileSource(StrEnum):
    MOUNTED = "Mounted"
    """Coefficients of the mounted profile, corrected online."""
    LEARNING = "Learning"
    """Coefficients learned from this pod's own steps, since there is no usable profile."""


class HistogramState(Model):
    counts: list[int]
    """Observations per bucket, not cumulative. There is one bucket more than bounds, for values above all bounds."""
    sum_s: float = 0.0


def _is_mounted(_profile: Any, source: ProfileSource) -> list[Labelled]:
    return [((), source == ProfileSource.MOUNTED)]


class ProfileState(Model):
    METRICS: ClassVar[Group] = Group("The latency profile")
    source: Annotated[ProfileSource, Metric("outrider_profile_mounted", series=_is_mounted)] = ProfileSource.LEARNING
    """1 while the coefficients come from a mounted profile (corrected online), 0 while they are learned from this pod's
    own steps."""
    target_key: str = ""
    error_percent: Annotated[float | None, Metric("outrider_profile_error_percent")] = None
    """Held-out error of the profile in force, in percent. Absent while there is none."""
    mismatch: Annotated[str, Metric("outrider_profile_mismatch")] = ""
    """Device, engine version or commit differ from those that the profile was measured on: 1 with a sentence in the
    state, 0 when they agree."""
    load_error: Annotated[str, Metric("outrider_profile_load_error")] = ""
    """A mounted profile file cannot be read: 1 with a sentence in the state. The coefficients before it stay in
    force."""


class Verification(StrEnum):
    """Verification lengths at which the target runs fastest."""

    VARLEN = "Varlen"
    """Any lengths: CUDA graphs fit uniform and varlen steps, or there are no graphs (CPU)."""
    UNIFORM = "Uniform"
    """One length for all requests, in one full CUDA graph. A varlen step runs in pieces and costs more."""


class DrafterMemory(Model):
    """Memory of a drafter on each device, whether it is used or not."""

    weight_bytes: int
    """Bytes of its weights, without those that it shares with the target."""
    kv_bytes_per_token: int
    """Bytes of a cached token in its layers."""
    concurrency_percent: float
    """Share of the KV cache's tokens that the drafter costs."""


MEMORY_WORDS = (
    "the pool does not fit into memory",  # the plugin's, before it serves
    "memory ended while the target's graphs were captured",
    "out of memory",  # torch's, of a device
    "not enough memory",  # torch's, of a host
    "cannot allocate memory",  # Linux's
)
"""Parts of `DrafterReport.reason`, in lower case, that mean too little memory. The word may be part of a model name."""


class DrafterReport(Model):
    METRICS: ClassVar[Group] = Group(
        "Drafters", "All carry the label `drafter`: the name in `spec.draftPool`.", label="drafter"
    )
    name: str
    kind: str = ""
    """Name of the block drafter that its checkpoint is (DFlash, DFlash2, DSpark); empty for other methods."""
    loaded: Annotated[bool, Metric("outrider_drafter_loaded")]
    """1 while the drafter is loaded."""
    reason: Annotated[
        str, Metric("outrider_drafter_info", labels=("reason",), series=lambda _drafter, reason: [((reason,), 1.0)])
    ] = ""
    """Always 1. Label `reason`: why the drafter is not loaded or is suspended, in a sentence; empty when it is in
    use."""
    request_steps: Annotated[int, Metric("outrider_drafter_request_steps_total")] = 0
    """(request, step) pairs in which at least one of its proposed tokens was verified."""
    tried: Annotated[int, Metric("outrider_drafter_tried_total")] = 0
    """Proposed tokens that were really tried: not those after the first rejection."""
    verified: Annotated[int, Metric("outrider_drafter_verified_total")] = 0
    """Proposed tokens that the target scored, tried or not."""
    accepted: Annotated[int, Metric("outrider_drafter_accepted_total")] = 0
    """Proposed tokens that were accepted. Accepted / tried is the acceptance rate."""
    memory: DrafterMemory | None = None
    """None for a drafter without a model, and before the engine has its memory."""


class SLOClassState(Model):
    METRICS: ClassVar[Group] = Group(
        "SLO classes", "All carry the label `slo_class`: the name in `spec.sloClasses`.", label="slo_class"
    )
    name: str
    finished: Annotated[int, Metric("outrider_slo_class_finished_total")] = 0
    """Requests with a verdict: those that finished, and those whose client left after TTFT or TPOT had passed, which
    are misses. A client that leaves before that is in neither this nor the next metric."""
    attained: Annotated[int, Metric("outrider_slo_class_attained_total")] = 0
    """Finished requests that met the class's TPOT, and its TTFT where it has one."""
    aborted: Annotated[int, Metric("outrider_slo_class_aborted_total")] = 0
    """Requests whose client left before the answer was complete, in time or not. vLLM cannot tell a client that leaves
    from an answer that ends at a stop string: a request that has stop strings counts as complete once it has a
    token."""
    output_tokens: Annotated[int, Metric("outrider_slo_class_output_tokens_total")] = 0
    """Output tokens of finished requests."""
    tpot: Annotated[HistogramState, Metric("outrider_slo_class_tpot_seconds", bounds_s=TPOT_BUCKETS_S)]
    """Time per output token after the first, of each finished request; where its client left, what it had come to by
    then. The buckets are the same in every pod, so that they can be added."""
    ttft: Annotated[HistogramState, Metric("outrider_slo_class_ttft_seconds", bounds_s=TTFT_BUCKETS_S)]
    """Time to the first token of each finished request; where its client left before that, how long it had waited."""


class AdapterState(Model):
    METRICS: ClassVar[Group] = Group(
        "LoRA adapters", "All carry the label `adapter`: the name in `spec.adapters`.", label="adapter"
    )
    name: str
    loaded: Annotated[bool, Metric("outrider_adapter_loaded")] = False
    """1 while requests may name the adapter."""
    reason: str = ""
    """Reason why it, or its present source, could not be loaded, in a sentence; empty while it is being loaded."""
    output_tokens: Annotated[int, Metric("outrider_adapter_output_tokens_total")] = 0
    """Output tokens of its requests that ended."""
    tried: Annotated[int, Metric("outrider_adapter_tried_total")] = 0
    """Proposed tokens of its requests that were really tried: not those after the first rejection."""
    accepted: Annotated[int, Metric("outrider_adapter_accepted_total")] = 0
    """Proposed tokens of its requests that were accepted. Accepted / tried is the acceptance rate."""
    finished: Annotated[
        dict[str, int], Metric("outrider_adapter_finished_total", labels=("slo_class",), series=by_class)
    ] = {}
    """Its requests with a verdict, as in `outrider_slo_class_finished_total`. Label `slo_class`: the request's class;
    requests without one are not counted here."""
    attained: Annotated[
        dict[str, int], Metric("outrider_adapter_attained_total", labels=("slo_class",), series=by_class)
    ] = {}
    """Requests among them that met the class. Label `slo_class`: the class."""


class SpeedupState(Model):
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


class CanaryState(Model):
    """Both arms of the canary in force. Sums start from 0 with the process, and with another id."""

    METRICS: ClassVar[Group] = Group("Draft canary")
    id: str
    """`CanaryConfig.id`."""
    stable: ArmCounters = ArmCounters()
    candidate: ArmCounters = ArmCounters()


REASONS = ("Pays", "NotWorthIt", "Off", "NoDrafter", "NoTraffic", "Measuring")


class ChoiceState(Model):
    """The controller's current choice, for people."""

    METRICS: ClassVar[Group] = Group("The present choice")
    drafter: str = ""
    draft_tokens: Annotated[
        float,
        Metric(
            "outrider_chosen_draft_tokens", labels=("drafter",),
            series=lambda choice, tokens: [((choice.drafter,), tokens)],
        ),
    ] = 0.0  # fmt: skip
    """Mean draft length over the last steps' decoding requests. Label `drafter`: the drafter used most, empty when none
    was."""
    reason: Annotated[
        str,
        Metric(
            "outrider_choice", labels=("reason",),
            series=lambda _choice, reason: [((name,), reason == name) for name in REASONS],
        ),
    ] = ""  # fmt: skip
    """1 for the reason of the present choice, 0 for the others. Label `reason`: `Pays`, `NotWorthIt` (no speculation is
    the right choice), `Off`, `NoDrafter`, `NoTraffic`, `Measuring`."""
    has_disabled_drafts: Annotated[bool, Metric("outrider_drafts_gated"), Field(alias="gated")] = False
    """1 while a drafter is disabled, since it has not been chosen for a while, as under load: it is fed no prompts, and
    its KV gaps stay."""
    running: Annotated[int, Metric("outrider_requests_running")] = 0
    """Requests in the last engine step."""


def _what_runs(state: Any, revision: str) -> Iterator[Labelled]:
    yield (
        (revision, state.config_hash, state.product, state.device, state.engine_version, state.profile.target_key),
        1.0,
    )


def _by_length(_state: Any, counts: list[int]) -> list[Labelled]:
    return [((str(length),), count) for length, count in enumerate(counts)]


class RuntimeState(Contract):
    METRICS: ClassVar[Group] = Group("The pod and its engine's steps")
    schema_version: int = STATE_SCHEMA
    service: str
    namespace: str
    revision: Annotated[
        str,
        Metric(
            "outrider_info", labels=("revision", "config_hash", "product", "device", "engine_version", "target_key"),
            series=_what_runs,
        ),
    ]  # fmt: skip
    """Always 1; what runs in this pod. Labels `revision`, `config_hash` (digest of the hot config in force), `product`
    (as the node's label names it), `device`, `engine_version`, `target_key` (of the latency profile looked up)."""
    config_hash: str
    """Digest of the HotConfig in force."""
    config_error: Annotated[str, Metric("outrider_config_error")] = ""
    """The mounted hot config cannot be used: 1 with a sentence in the state. The one before it stays in force."""
    started_at: Annotated[float, Metric("outrider_started_timestamp_seconds")]
    """Unix time at which the process started."""
    reported_at: Annotated[float, Field(alias="now")]
    """Unix time of the report."""
    ready: Annotated[bool, Metric("outrider_ready")]
    """What `/readyz` answers: 1 while the engine is healthy, the plugin reports, and the pod is not draining."""
    plugin_active: Annotated[bool, Metric("outrider_plugin_active")]
    """1 while the controller inside the engine process is active and its last report is fresh."""
    product: str = ""
    device: str = ""
    engine_version: str = ""
    verification: Verification | None = None
    """None before the engine has started."""
    profile: ProfileState = ProfileState()
    choice: ChoiceState = ChoiceState()
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
        Metric("outrider_draft_length_request_steps_total", labels=("draft_tokens",), series=_by_length),
    ] = []
    """(request, step) pairs that verified so many proposed tokens. Label `draft_tokens`: "0", "1", ... up to
    `maxDraftTokens` at boot."""
    dropped_steps: Annotated[int, Metric("outrider_dropped_steps_total")] = 0
    """Step times that were ignored: NaN, negative, or absurd as after a machine was suspended (over a second, and over
    eight times what was predicted or outside the models' passes)."""
    loop_failures: Annotated[int, Metric("outrider_loop_failures_total")] = 0
    """Times that the control loop itself raised. Each costs the pool's speculation for a while, and no request its
    answer."""
    broken_answers: Annotated[int, Metric("outrider_broken_answers_total")] = 0
    """Requests that ended with an error since the engine computed NaN or infinity for them: an adapter, the target's
    weights or the device is faulty. If all requests are like that, the pod restarts."""
    decision_s: Annotated[float, Metric("outrider_decision_seconds_total")] = 0.0
    """Seconds spent deciding. Divide by `outrider_steps_total` for the cost of a decision."""
    caught_up_tokens: Annotated[int, Metric("outrider_caught_up_tokens_total")] = 0
    """Tokens that a draft model was fed to fill gaps in its KV, so that running requests are drafted for again after a
    time without it."""
    catch_up_s: Annotated[float, Metric("outrider_catch_up_seconds_total")] = 0.0
    """Seconds that this feeding took, as measured on the device."""
    drafters: list[DrafterReport] = []
    slo_classes: list[SLOClassState] = Field(default=[])
    adapters: list[AdapterState] = []
    speedup: SpeedupState = SpeedupState()
    canary: CanaryState | None = None
    """None without `HotConfig.canary`, and in pods of releases that do not know it."""
