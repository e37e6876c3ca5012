"""Seconds of steps and drafts as a function of their shapes (TurboSpec eq. 2 and 3, with AdaServe's knee).

`StepCost` is the equation with its coefficients as a profile gives them, `Costs` holds the coefficients as corrected.
Shapes: D drafters, N requests, T the largest number of proposals considered, W nodes at a depth of a tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Bools, Columns, Floats, Ints
from outrider_runtime.control.compiled import compilable, compiled
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.value import Price


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


UNIFORM, VARLEN, BEYOND = range(3)


class Costs(NamedTuple):
    """Coefficients that step times are predicted from. D drafters."""

    target: Floats
    """(3, 8): corrected cost of the target in each mode: UNIFORM, VARLEN, BEYOND."""
    graph: float
    """Batched tokens of the largest graph."""
    drafts: Floats
    """(D, 2, 8): corrected cost of a pass, and of what the first pass adds to it."""
    passes: Bools
    """(D,): autoregressive drafters: every token is a pass."""
    reads: Bools
    """(D,): drafters that must be fed committed tokens."""
    hidden: Bools
    """(D,): drafters that read the target's hidden states."""
    budgets: Floats
    """(D,): most context tokens of a request that a pass reads; 0: all."""


@compiled
def _varlen_row(costs: Costs, tokens: float) -> Floats:
    """Coefficients of a varlen step; past the largest graph those of BEYOND."""
    row: Floats = costs.target[BEYOND if tokens > costs.graph else VARLEN]
    return row


@compiled
def decode_s(costs: Costs, shape: Shape, proposals: float) -> float:
    """Seconds of the target's pass over a shape and its proposals: a varlen step if several requests have proposals."""
    tokens = shape.n_batched + proposals
    even = shape.n_prompt == 0.0 and (proposals == 0.0 or shape.n_requests == 1.0) and tokens <= costs.graph
    return pass_s(costs.target[UNIFORM] if even else _varlen_row(costs, tokens), shape, proposals)


@compiled
def _plain_rate(costs: Costs, shape: Shape) -> float:
    """Modelled goodput of plain decoding, tokens per second; 0 while no cost is known."""
    alone = without_prompts(shape)
    seconds = decode_s(costs, alone, 0.0)
    return float(alone.n_requests / seconds) if seconds > 0.0 else 0.0


@compiled
def prompt_s(costs: Costs, shape: Shape, proposals: float, tokens: float) -> float:
    """Seconds that `tokens` of prompts add to a step of `shape` that verifies `proposals`."""
    longer = Shape(
        shape.n_context, shape.n_batched + tokens, shape.n_requests, shape.n_context_query, shape.n_prompt + tokens
    )
    seconds = decode_s(costs, longer, proposals) - decode_s(costs, shape, proposals)
    return float(max(seconds, costs.target[VARLEN, BATCHED] * tokens))


@compiled
def _fill(seconds: Floats, cost: Floats, shape: Shape, first: int) -> None:
    """Set `seconds` to those of `shape` with `first`, `first` + 1, .. proposals."""
    fixed_s = pass_s(cost, shape, 0.0) - cost[ABOVE] * max(0.0, shape.n_batched - cost[KNEE])
    for n in range(len(seconds)):
        above = max(0.0, shape.n_batched + first + n - cost[KNEE])
        seconds[n] = fixed_s + (cost[BATCHED] + cost[LOGITS]) * (first + n) + cost[ABOVE] * above


@compiled
def node_s(costs: Costs, context: Ints, read_s: float) -> Floats:
    """(N,): `Price.node_s`. context: (N,), context tokens of the requests. read_s: seconds that a verified token adds
    to the drafters' next first passes."""
    seconds = np.empty(len(context))
    for i in range(len(context)):
        seconds[i] = costs.target[VARLEN, QUERY] * context[i] / 1000 + read_s
    return seconds


@compiled
def price(costs: Costs, shape: Shape, node_s: Floats, lambda_over_plain: float, most: int) -> Price:
    """Seconds of a step of `shape`, which holds no proposals yet, with 0 to `most` proposals.

    The step is varlen if it holds proposals or a prompt; that of one request without a prompt is uniform.
    lambda_over_plain: measured goodput / modelled goodput of plain decoding."""
    seconds = np.empty(max(0, most) + 1)
    in_graph = int(max(0.0, min(float(len(seconds)), costs.graph - shape.n_batched + 1.0)))
    is_uniform = shape.n_requests == 1.0 and shape.n_prompt == 0.0
    _fill(seconds[:in_graph], costs.target[UNIFORM if is_uniform else VARLEN], shape, 0)
    _fill(seconds[in_graph:], costs.target[BEYOND], shape, in_graph)
    seconds[0] = decode_s(costs, shape, 0.0)
    rate = _plain_rate(costs, shape) * lambda_over_plain
    return Price(seconds, node_s, rate, token_s(_varlen_row(costs, shape.n_batched), shape.n_batched))


@compiled
def read_tokens(context: int, budget: float) -> float:
    """Context tokens of a request that a pass reads. budget: most tokens; 0: all."""
    return min(float(context), budget) if budget > 0.0 else float(context)


@compiled
def draft_columns(costs: Costs, context: Ints, prompts: float, widest: int) -> tuple[Floats, Floats, Floats]:
    """Seconds of drafts:

    - (D,) the first pass over one token per request and `prompts` tokens, or a lookup's call;
    - (D, W) each later pass, by the width of the trees;
    - (D,) a further token in the first pass, for drafters that must be fed.

    A drafter that is the target itself has the seconds of a pass without requests here; `use_s` has the rest.
    context: (N,), context tokens of the requests that decode.
    """
    drafters, decoding = len(costs.drafts), float(len(context))
    first_s, later_s, token_s_of = np.zeros(drafters), np.zeros((drafters, widest)), np.zeros(drafters)
    for d in range(drafters):
        cost, read = costs.drafts[d], 0.0
        for tokens in context:
            read += read_tokens(tokens, costs.budgets[d])
        shape = later_pass(read, decoding, 1.0)
        if costs.budgets[d] > 0.0 and not costs.reads[d]:  # the target itself: see `use_s`
            shape = Shape(0.0, 0.0, 0.0, 0.0, 0.0)
        if is_block(costs, d):
            first_s[d] = pass_s(cost[0], shape, 0.0)
            continue
        first_s[d] = pass_s(cost[0], shape, 0.0) + pass_s(cost[1], shape, 0.0)
        first_s[d] += feeding_s(costs, d, prompts * costs.reads[d], decoding)
        token_s_of[d] = (token_s(cost[0], decoding) + token_s(cost[1], decoding)) * costs.reads[d]
        for w in range(widest if costs.passes[d] else 0):
            later_s[d, w] = pass_s(cost[0], later_pass(shape.n_context, shape.n_requests, w + 1.0), 0.0)
    return first_s, later_s, token_s_of


@compiled
def is_block(costs: Costs, d: int) -> bool:
    """Whether one pass over hidden states proposes all tokens. Such a drafter is fed in every step, at the price of
    `costs.drafts[d, 1]`, so that proposing costs the pass alone."""
    return bool(costs.hidden[d] and not costs.passes[d])


@compiled
def feeding_s(costs: Costs, d: int, tokens: float, decoding: float) -> float:
    """Seconds that feeding a drafter `tokens` adds to its first pass over `decoding` tokens, with the knee."""
    seconds = 0.0
    for cost in costs.drafts[d]:
        bent = max(0.0, decoding + tokens - cost[KNEE]) - max(0.0, decoding - cost[KNEE])
        seconds += cost[BATCHED] * tokens + cost[ABOVE] * bent
    return seconds


@compiled
def fed_token_s(costs: Costs, d: int) -> float:
    """Most seconds that one more token adds to a drafter's first pass: those past its knee."""
    seconds = 0.0
    for row in range(2):
        seconds += costs.drafts[d, row, BATCHED] + costs.drafts[d, row, ABOVE]
    return float(seconds)


@compiled
def later_pass(context: float, requests: float, width: float) -> Shape:
    """Shape of a later draft pass over `width` nodes of each request."""
    return Shape(context, width * requests, requests, width * context / 1000, 0.0)


@compiled
def _above_s(cost: Floats, requests: int) -> float:
    """A request's share of the seconds above the knee if all requests use the drafter, since it is not known yet which
    do. cost: (8,)"""
    return float(cost[ABOVE] * max(0.0, requests - cost[KNEE]) / max(1, requests))


@compiled
def use_s(costs: Costs, context: Ints) -> Floats:
    """(D, N): seconds that a request of `context` (N,) tokens adds to each pass of a drafter that it uses; 0 for
    drafters that run over the whole batch anyway. (0, 0) if all do."""
    apart = (costs.budgets > 0.0) & ~costs.reads
    if not apart.any():
        return np.zeros((0, 0))
    seconds = np.zeros((len(costs.drafts), len(context)))
    for d in np.flatnonzero(apart):
        cost = costs.drafts[d, 0]
        for i in range(len(context)):
            read = read_tokens(context[i], costs.budgets[d])
            alone = pass_s(cost, Shape(read, 1.0, 1.0, read / 1000, 0.0), 0.0)
            seconds[d, i] = alone - cost[CONSTANT] + _above_s(cost, len(context))
    return seconds


@compiled
def read_s(costs: Costs, lengths: Ints, decoding: float) -> float:
    """Seconds that a verified token adds to the next first passes of the drafters that propose, of `lengths` (D,)."""
    seconds = 0.0
    for d in range(len(costs.drafts)):
        if costs.reads[d] and lengths[d] > 0 and not is_block(costs, d):
            seconds += token_s(costs.drafts[d, 0], decoding) + token_s(costs.drafts[d, 1], decoding)
    return seconds
