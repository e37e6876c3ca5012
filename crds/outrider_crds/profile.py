"""The latency profile: a profiling Job reports it, a ConfigMap stores it, and the runtime loads it.

There is one ConfigMap for a target on a product. Its file `target.json` is a `TargetProfile`, and `<drafter key>.json`
a `DrafterProfile`. A Job reports a `ProfilingResult` in its termination message.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from outrider_crds.base import Model
from outrider_crds.contract import Contract

PROFILE_SCHEMA = 1
TARGET_FILE = "target.json"
TERMINATION_MESSAGE_LIMIT = 4096
REPROFILE_ANNOTATION = "outrider.dev/reprofile"


def _timestamp(value: str) -> str:
    datetime.fromisoformat(value)  # raises ValueError, as pydantic wants it
    return value


Timestamp = Annotated[str, Field(max_length=40), AfterValidator(_timestamp)]
"""RFC 3339, UTC."""
Seconds = Annotated[float, Field(ge=0, lt=1e4, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)] | None
"""A count; None in profiles of older releases."""


class ProfileExecutionMode(StrEnum):
    """Ways in which the engine runs a step. Each has its own coefficients."""

    UNIFORM = "uniform"
    """Every decoding request has the same number of tokens (full CUDA graph, if there is one)."""
    VARLEN = "varlen"
    """Requests have different numbers of tokens, or the step has a prefill chunk."""
    BEYOND_GRAPH = "beyondGraph"
    """The step has more tokens than the largest captured graph."""


class ProfileStepCost(Model):
    """Coefficients for the seconds of one forward pass (TurboSpec eq. 2, with a knee).

    `a*N_context + g1*N_batched + g2*max(0, N_batched - knee) + l*N_logits + r*n_requests + x*N_context_query + d`.
    `N_context_query` is the sum of context x query length over the requests, divided by 1000. `N_logits` is the number
    of batched tokens without those of prompts.
    """

    per_context_token_s: Seconds = 0.0
    per_batched_token_s: Seconds = 0.0
    per_batched_token_above_knee_s: Seconds = 0.0
    knee_tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Batched tokens above which the hardware is compute-bound (AdaServe's token budget B)."""
    per_request_s: Seconds = 0.0
    per_context_query_s: Seconds = 0.0
    per_logits_token_s: Seconds = 0.0
    """Seconds of the model's head and the sampler per token that may be sampled; 0 in profiles of older releases."""
    constant_s: Seconds = 0.0

    def seconds(self, context: float, batch: int, tokens: int) -> float:
        """Seconds of a step of `batch` requests, each with `context` cached tokens and `tokens` to sample."""
        return self.without_context_s(batch, tokens) + context * self.context_token_s(batch, tokens)

    def without_context_s(self, batch: float, tokens: float) -> float:
        """Seconds of the same step with empty contexts."""
        batched = batch * tokens
        return (
            self.constant_s
            + (self.per_batched_token_s + self.per_logits_token_s) * batched
            + self.per_batched_token_above_knee_s * max(0.0, batched - self.knee_tokens)
            + self.per_request_s * batch
        )

    def context_token_s(self, batch: int, tokens: int) -> float:
        """Seconds that one more cached token in each request adds."""
        return self.per_context_token_s * batch + self.per_context_query_s * batch * tokens / 1000


LEAST_PASS_S = 1e-9
"""Shortest credible pass, which no device beats: speed-ups divide by the time of passes."""


def _takes_time(cost: ProfileStepCost) -> ProfileStepCost:
    if cost.seconds(context=1, batch=1, tokens=1) < LEAST_PASS_S:
        raise ValueError("a pass takes no time at all")
    return cost


TimedCost = Annotated[ProfileStepCost, AfterValidator(_takes_time)]
"""Cost of passes that take a credible time."""
Costs = Annotated[dict[ProfileExecutionMode, TimedCost], Field(min_length=1)]


class TargetProfile(Contract):
    schema_version: int = PROFILE_SCHEMA
    key: str
    model: str
    product: str
    device: str = ""
    """Name of the device in the engine ("NVIDIA H200", the CPU's model name)."""
    engine_version: str = ""
    commit: str = ""
    """Resolved commit (or content digest) of the weights."""
    costs: Costs
    error_percent: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Median relative error on held-out shapes, including those around the crossover."""
    spread_percent: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Run-to-run spread of one shape. A large one means that the machine was noisy."""
    most_requests: Count = None
    """Requests in the largest batch that was measured."""
    request_tokens: Count = None
    """Longest request of the engine that was measured, in tokens."""
    kv_tokens: Count = None
    """Tokens in the KV cache of the engine that was measured."""
    measured_at: Timestamp


class DrafterProfile(Contract):
    schema_version: int = PROFILE_SCHEMA
    key: str
    name: str
    """Name of the drafter when it was measured, for people. The key identifies it."""
    cost: TimedCost
    """Cost of one draft forward pass, `T_d(N_context, N_batched)`. Prompt lookup has only constant and per-request
    terms. Later passes of a beam are passes over `n_requests * width` tokens."""
    autoregressive: bool
    """True: `K` passes per step, the first over the target's tokens. False: one proposal call per step."""
    widest: Annotated[int, Field(ge=1)] = 1
    """Nodes per depth of the widest trees that were measured; 1 in profiles of releases that measured chains."""
    first_pass: ProfileStepCost = ProfileStepCost()
    """Additional cost of the first pass, and of a block drafter the cost of feeding; zero in profiles of releases that
    did not measure it."""
    most_requests: Count = None
    """Requests in the largest batch that was measured."""
    budget_tokens: Count = None
    """Most tokens of a request that a pass reads, in whole pages of the KV cache; None without a window."""
    error_percent: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    commit: str = ""
    measured_at: Timestamp


HUB_UNAVAILABLE = "HubUnavailable"
"""Reason of a failure that may pass: the hub was away while models were downloaded."""


class ProfilingFailure(Model):
    reason: Annotated[str, Field(max_length=64)]
    """CamelCase: ModelNotFound, VocabularyMismatch, DrafterFailed, Noisy, OutOfMemory, EngineFailed ..."""
    message: Annotated[str, Field(max_length=1024)]
    drafter: str = ""
    """Name of the drafter that failed; empty if the target did."""


class ProfilingResult(Contract):
    """The Job's termination message: measurements and failures."""

    schema_version: int = PROFILE_SCHEMA
    target: TargetProfile | None = None
    drafters: list[DrafterProfile] = []
    failures: list[ProfilingFailure] = []
