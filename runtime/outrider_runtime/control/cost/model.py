"""Seconds of a step as a function of its shape (TurboSpec eq. 2 and 3, with AdaServe's knee)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compilable, compiled
from outrider_runtime.control.data.batch import Columns, Floats
from outrider_runtime.control.data.plans import ExecutionMode


class Shape(NamedTuple):
    """The sizes of a forward pass that its time depends on. All are floats, the type that compiled code expects."""

    n_context: float
    """Tokens whose KV is cached, summed over the requests."""
    n_batched: float
    """Tokens in the pass."""
    n_requests: float
    n_context_query: float = 0.0
    """Sum of context x query tokens over the requests, divided by 1000."""
    n_prompt: float = 0.0
    """Prompt tokens in the pass; their logits are not computed."""


CONSTANT, CONTEXT, BATCHED, ABOVE, KNEE, REQUEST, QUERY, LOGITS = range(8)
"""Positions of the coefficients in a cost array (8,)."""


@compiled
def pass_s(cost: Floats, shape: Shape, proposals: float) -> float:
    """Seconds of a pass over `shape` plus `proposals` tokens. cost: (8,), see `StepCost`, which has the equation."""
    tokens = shape.n_batched + proposals
    return float(
        cost[CONSTANT]
        + cost[CONTEXT] * shape.n_context
        + cost[BATCHED] * tokens
        + cost[ABOVE] * max(0.0, tokens - cost[KNEE])
        + cost[REQUEST] * shape.n_requests
        + cost[QUERY] * shape.n_context_query
        + cost[LOGITS] * (tokens - shape.n_prompt)
    )


@compiled
def token_s(cost: Floats, tokens: float) -> float:
    """Seconds of one more token with logits in a pass of `tokens`. cost: (8,)."""
    above = cost[ABOVE] if tokens >= cost[KNEE] else 0.0
    return float(cost[BATCHED] + cost[LOGITS] + above)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of one forward pass, in seconds; mirrors the profile's StepCost field by field.

    `a*N_context + g1*N_batched + g2*max(0, N_batched - knee) + l*N_logits + r*n_requests + x*N_context_query + d`,
    where `N_logits` counts the batched tokens that are not a prompt's.
    """

    per_context_token_s: float = 0.0
    per_batched_token_s: float = 0.0
    per_batched_token_above_knee_s: float = 0.0
    knee_tokens: float = 0.0
    per_request_s: float = 0.0
    per_context_query_s: float = 0.0
    constant_s: float = 0.0
    per_logits_token_s: float = 0.0

    def coefficients(self) -> Floats:
        """(8,): in the order CONSTANT .. LOGITS."""
        return np.array([
            self.constant_s, self.per_context_token_s, self.per_batched_token_s, self.per_batched_token_above_knee_s,
            self.knee_tokens, self.per_request_s, self.per_context_query_s, self.per_logits_token_s,
        ])  # fmt: skip

    def seconds(self, shape: Shape) -> float:
        return pass_s(self.coefficients(), Shape(*map(float, shape)), 0.0)


FREE = StepCost()
"""A cost of zero."""


@dataclass(frozen=True, slots=True)
class DrafterCost:
    """One draft forward pass (or one lookup), in seconds."""

    cost: StepCost
    autoregressive: bool = True
    """True: K passes in a step, the first one over all of the target's tokens. False: one call for any K."""
    first_pass: StepCost = FREE
    """What the first pass costs beyond a later one: an EAGLE head reads the target's hidden states there."""

    def seconds(self, first: Shape, draft_tokens: int, width: int = 1) -> float:
        """Seconds of a draft: T_first + T_d(N_context, N_batched) + (K-1) * T_d(N_context, width * n).

        K = 0 is the first pass alone. A block drafter makes one pass for any K > 0, and at K = 0 it takes T_first
        alone."""
        if not self.autoregressive and draft_tokens == 0:
            return self.first_pass.seconds(first)
        once = self.cost.seconds(first) + self.first_pass.seconds(first)
        if not self.autoregressive or draft_tokens <= 1:
            return once
        later = Shape(first.n_context, width * first.n_requests, first.n_requests, width * first.n_context / 1000)
        return once + (draft_tokens - 1) * self.cost.seconds(later)


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The costs of a profile. Immutable: the controller keeps its online corrections elsewhere."""

    target: Mapping[ExecutionMode, StepCost]
    """The target's cost by mode. A missing mode uses another's; if empty, the costs are learned."""
    drafters: Mapping[str, DrafterCost] = field(default_factory=dict)
    """Costs by drafter name; the cost of a missing drafter is learned."""


@compilable
def without_prompts(shape: Shape) -> Shape:
    """The shape of the decoding requests alone, one token each. All of the context is assumed to be theirs."""
    if shape.n_prompt == 0.0:
        return shape
    decoding = shape.n_batched - shape.n_prompt
    return Shape(shape.n_context, decoding, decoding, shape.n_context / 1000, 0.0)


@compiled
def room(shape: Shape, token_budget: int, free_kv_tokens: int) -> int:
    """Most proposals that a step of `shape` may hold."""
    decoding = int(shape.n_batched - shape.n_prompt)
    return max(0, min(token_budget - decoding, free_kv_tokens - int(shape.n_batched)))


@compiled
def this_step(batch: Columns) -> Shape:
    """Shape of the target's pass over a batch, without proposals."""
    context, prompt, prompt_left = batch.context, batch.prompt, batch.prompt_left
    requests, cached, tokens, prompts, query = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(len(context)):
        if prompt[i] > 0 or prompt_left[i] == 0:
            own = max(1, prompt[i])
            requests += 1
            cached += context[i]
            tokens += own
            prompts += prompt[i]
            query += own * context[i]
    return Shape(cached, tokens, requests, query / 1000, prompts)


@compiled
def next_step(batch: Columns, budget: int) -> Shape:
    """Shape of the step after it, of at most `budget` tokens. Prefills go on; a decoding request has one token more, or
    has ended with its last one."""
    context, prompt, prompt_left = batch.context, batch.prompt, batch.prompt_left
    requests, cached, tokens, prompts, query = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(len(context)):
        if prompt_left[i] == 0 and batch.left[i] <= 1:
            continue
        requests += 1
        after = context[i] + max(1, prompt[i])
        own = min(prompt_left[i], budget - prompts) if prompt_left[i] else 1
        prompts += own if prompt_left[i] else 0
        cached += after
        tokens += own
        query += own * after
    return Shape(cached, tokens, requests, query / 1000, prompts)
