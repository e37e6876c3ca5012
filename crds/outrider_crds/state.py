"""What a pod answers at `GET /outrider/state` (admin port): versioned JSON, counters since the process started.

Counters only grow, so that a reader takes differences over a window of its own and sums them over pods;
`started_at` tells it that a process is a new one. The Prometheus metrics are generated from the same document.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from outrider_crds.base import Model
from outrider_crds.contract import Contract

STATE_SCHEMA = 1

# Upper bounds of the TPOT and TTFT histograms in seconds; fixed, so that pods' histograms can be added.
TPOT_BUCKETS_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.0625, 0.075, 0.1,
    0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0,
)  # fmt: skip
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 60.0)


class ProfileSource(StrEnum):
    MOUNTED = "Mounted"
    """The coefficients of the mounted profile, corrected online."""
    LEARNING = "Learning"
    """No usable profile: coefficients are learned from this pod's own steps."""


class Histogram(Model):
    counts: list[int]
    """Observations per bucket, not cumulative; one more than the bounds, the last one above them all."""
    sum_s: float = 0.0


class ProfileState(Model):
    source: ProfileSource = ProfileSource.LEARNING
    target_key: str = ""
    error_percent: float | None = None
    mismatch: str = ""
    """Sentence: device, engine or commit differ from those the profile was measured on; empty when they agree."""
    load_error: str = ""
    """Sentence: a mounted file could not be read; the coefficients before it stay in force."""


class Verification(StrEnum):
    """Which lengths of proposals the target verifies at their best price."""

    VARLEN = "Varlen"
    """Another length for each request as well as the same for all: graphs fit both, or there are none (CPU)."""
    UNIFORM = "Uniform"
    """The same length for all requests, in one whole CUDA graph. Lengths that differ run in pieces, at a price of their
    own."""


class DrafterMemory(Model):
    """What a drafter takes of each device, used or not."""

    weight_bytes: int
    """Of its weights, less what it shares with the target."""
    kv_bytes_per_token: int
    """What a cached token takes in its layers."""
    concurrency_percent: float
    """Share of the cached tokens that the engine could hold without this drafter."""


class DrafterState(Model):
    name: str
    loaded: bool
    reason: str = ""
    """Why it is not loaded, or is suspended, in a sentence."""
    request_steps: int = 0
    """Counter: (request, step) pairs in which it proposed at least one token that the target verified."""
    tried: int = 0
    """Counter: proposed tokens really tried (not those after the first rejection)."""
    verified: int = 0
    """Counter: proposed tokens that the target scored."""
    accepted: int = 0
    """Counter."""
    memory: DrafterMemory | None = None
    """None for a drafter without a model, and before the engine has its memory."""


class SLOClassState(Model):
    name: str
    finished: int = 0
    """Counter: requests with a verdict. They finished, or their client left when TTFT or TPOT had passed."""
    attained: int = 0
    """Counter: those that met the class's TPOT, and its TTFT where it has one."""
    aborted: int = 0
    """Counter: requests whose client left, before or after TTFT and TPOT had passed."""
    output_tokens: int = 0
    """Counter: tokens of `finished`."""
    tpot: Histogram
    """Of `finished`; where the client left, what it had come to by then."""
    ttft: Histogram
    """Of `finished`; where the client left before the first token, how long it had waited."""


class SpeedupState(Model):
    """Probes: blocks of k = 0 steps, compared with the steps around them that speculate."""

    probes: int = 0
    """Counter."""
    baseline_tokens: int = 0
    """Counter: tokens of the probes."""
    baseline_s: float = 0.0
    """Counter: seconds of the probes."""
    speculative_tokens: int = 0
    """Counter: tokens that steps with speculation give in `speculative_s`."""
    speculative_s: float = 0.0
    """Counter."""
    weight: float = 0.0
    """Counter: sum of 1 / variance of the probes' ratios, goodput of a step that speculates by that of one that does
    not."""
    weighted_ratio: float = 0.0
    """Counter: sum of the ratios, each times its weight."""


class ChoiceState(Model):
    """The controller's present choice, for people."""

    drafter: str = ""
    draft_tokens: float = 0.0
    """Mean draft length over the last steps' decoding requests."""
    reason: str = ""
    """One of Pays, NotWorthIt, Off, NoDrafter, NoTraffic, Measuring (condition SpeculationActive)."""
    gated: bool = False
    """True while some draft's cache is not fed under load."""
    running: int = 0
    """Requests in the last step."""


class RuntimeState(Contract):
    schema_version: int = STATE_SCHEMA
    service: str
    namespace: str
    revision: str
    config_hash: str
    """Of the HotConfig in force."""
    config_error: str = ""
    """Sentence: the mounted hot config could not be used; the one before it stays in force."""
    started_at: float
    """Unix seconds."""
    now: float
    ready: bool
    plugin_active: bool
    """The controller inside the engine core process has reported."""
    product: str = ""
    device: str = ""
    engine_version: str = ""
    verification: Verification | None = None
    """None before the engine has started."""
    profile: ProfileState = ProfileState()
    choice: ChoiceState = ChoiceState()
    steps: int = 0
    """Counter: engine steps that ran the model."""
    speculative_steps: int = 0
    """Counter: those that verified at least one proposed token."""
    output_tokens: int = 0
    """Counter: tokens that reached users."""
    busy_s: float = 0.0
    """Counter: seconds in engine steps."""
    proposed_tokens: int = 0
    """Counter: tokens drafted, verified or not."""
    draft_length_steps: list[int] = []
    """Counter per draft length 0..K: (request, step) pairs that verified so many proposed tokens."""
    dropped_steps: int = 0
    """Counter: step times ignored as NaN, negative or absurd (a suspended machine)."""
    loop_failures: int = 0
    """Counter: times that the control loop itself raised; each costs the pool's speculation for a while."""
    decision_s: float = 0.0
    """Counter: seconds spent deciding."""
    caught_up_tokens: int = 0
    """Counter: tokens that the neural draft ran over to close holes in its KV."""
    catch_up_s: float = 0.0
    """Counter: seconds that took, where they are measured (synchronous scheduling)."""
    drafters: list[DrafterState] = []
    slo_classes: list[SLOClassState] = Field(default=[])
    speedup: SpeedupState = SpeedupState()
