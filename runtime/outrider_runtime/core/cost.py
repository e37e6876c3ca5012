"""Seconds of a step as a function of its shape (TurboSpec eq. 2 and 3, with AdaServe's knee)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider_runtime.core.batch import Batch, Ints
from outrider_runtime.core.compiled import compiled
from outrider_runtime.core.plans import ExecutionMode


@dataclass(frozen=True, slots=True)
class Shape:
    """What a forward pass processes."""

    n_context: float
    """Tokens whose KV is cached, summed over the requests."""
    n_batched: float
    """Tokens in the pass."""
    n_requests: float
    n_context_query: float = 0.0
    """Sum of context x query tokens over the requests, divided by 1000."""
    n_prompt: float = 0.0
    """Of the tokens in the pass: those of prompts, whose logits nobody needs."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of one forward pass, in seconds; mirrors the profile's StepCost field by field.

    `a*N_context + g1*N_batched + g2*max(0, N_batched - knee) + l*N_logits + r*n_requests + x*N_context_query + d`,
    where `N_logits` are the batched tokens but a prompt's.
    """

    per_context_token_s: float = 0.0
    per_batched_token_s: float = 0.0
    per_batched_token_above_knee_s: float = 0.0
    knee_tokens: float = 0.0
    per_request_s: float = 0.0
    per_context_query_s: float = 0.0
    constant_s: float = 0.0
    per_logits_token_s: float = 0.0

    def token_s(self, batched: float) -> float:
        """What one more token costs in a pass of so many."""
        above = self.per_batched_token_above_knee_s if batched >= self.knee_tokens else 0.0
        return self.per_batched_token_s + above

    def seconds(self, shape: Shape) -> float:
        return (
            self.without_tokens_s(shape)
            + (self.per_batched_token_s + self.per_logits_token_s) * shape.n_batched
            + self.per_batched_token_above_knee_s * max(0.0, shape.n_batched - self.knee_tokens)
        )

    def without_tokens_s(self, shape: Shape) -> float:
        """Seconds of `shape` less what its batched tokens cost if each of them decodes."""
        return (
            self.constant_s
            + self.per_context_token_s * shape.n_context
            + self.per_request_s * shape.n_requests
            + self.per_context_query_s * shape.n_context_query
            - self.per_logits_token_s * shape.n_prompt
        )


FREE = StepCost()
"""Costs nothing."""


@dataclass(frozen=True, slots=True)
class DrafterCost:
    """One draft forward pass (or one lookup), in seconds."""

    cost: StepCost
    autoregressive: bool = True
    """True: K passes a step, the first over all of the target's tokens; False: one call however long K is."""
    first_pass: StepCost = FREE
    """What the first pass costs beyond a pass: an EAGLE head reads the target's hidden states there."""

    def token_s(self, batched: float) -> float:
        """What one more token of the target's step costs in the first pass, which holds so many."""
        return self.cost.token_s(batched) + self.first_pass.token_s(batched)

    def seconds(self, first: Shape, draft_tokens: int) -> float:
        """T_first + T_d(N_context, N_batched) + (K-1) * T_d(N_context, n); K = 0 is the first pass alone."""
        once = self.cost.seconds(first) + self.first_pass.seconds(first)
        if not self.autoregressive or draft_tokens <= 1:
            return once
        later = Shape(first.n_context, first.n_requests, first.n_requests, first.n_context / 1000)
        return once + (draft_tokens - 1) * self.cost.seconds(later)


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """A profile, converted: immutable; online correction lives in the controller."""

    target: Mapping[ExecutionMode, StepCost]
    """At least one mode, or empty: then the target's costs are learned. A missing mode uses another's."""
    drafters: Mapping[str, DrafterCost] = field(default_factory=dict)
    """By drafter name; one that is missing is learned."""


def this_step(batch: Batch) -> Shape:
    """What the target's pass of a batch processes without any proposal."""
    decoding, context, prompts, query = _this_step(batch.context, batch.prompt, batch.prompt_left)
    requests = decoding + int((batch.prompt > 0).sum()) if prompts else decoding
    return Shape(context, decoding + prompts, requests, query / 1000, prompts)


def next_step(batch: Batch) -> Shape:
    """The same of the step after it: who still reads its prompt then, reads; who decodes has one token more."""
    decoding, context, prompts, query = _next_step(batch.context, batch.prompt, batch.prompt_left, batch.token_budget)
    requests = decoding + int((batch.prompt_left > 0).sum()) if prompts else decoding
    return Shape(context, decoding + prompts, requests, query / 1000, prompts)


def without_prompts(shape: Shape, decoding: int) -> Shape:
    """Its `decoding` requests alone, a token each. The context is taken to be theirs."""
    return Shape(shape.n_context, decoding, decoding, shape.n_context / 1000)


@compiled
def _this_step(context: Ints, prompt: Ints, prompt_left: Ints) -> tuple[int, int, int, float]:
    decoding, cached, prompts, query = 0, 0, 0, 0.0
    for i in range(len(context)):
        if prompt[i] > 0 or prompt_left[i] == 0:
            tokens = max(1, prompt[i])
            decoding += prompt[i] == 0
            cached += context[i]
            prompts += prompt[i]
            query += tokens * context[i]
    return decoding, cached, prompts, query


@compiled
def _next_step(context: Ints, prompt: Ints, prompt_left: Ints, budget: int) -> tuple[int, int, int, float]:
    decoding, cached, prompts, query = 0, 0, 0, 0.0
    for i in range(len(context)):
        after = context[i] + max(1, prompt[i])
        decoding += prompt_left[i] == 0
        tokens = min(prompt_left[i], budget - prompts) if prompt_left[i] else 1
        prompts += tokens if prompt_left[i] else 0
        cached += after
        query += tokens * after
    return decoding, cached, prompts, query
