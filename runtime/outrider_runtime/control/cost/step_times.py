"""Predicted seconds of steps and drafts: `Costs`, and the functions of it that compiled code uses.

Shapes: D drafters, N requests, T the largest number of proposals considered, W nodes at a depth of a tree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost.model import (
    ABOVE,
    BATCHED,
    CONSTANT,
    KNEE,
    LOGITS,
    QUERY,
    Shape,
    pass_s,
    token_s,
    without_prompts,
)
from outrider_runtime.control.data.batch import Bools, Floats, Ints
from outrider_runtime.control.value import Price

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
def _plain_rate(costs: Costs, shape: Shape, fresh_prompts: float) -> float:
    """Modelled goodput of plain decoding, tokens per second; 0 while no cost is known.

    With f the share of steps that fresh prompts join, which makes them varlen, a plain step takes

        T_uniform + P(two or more prompts) * (T_varlen - T_uniform),  P = f + (1 - f) * ln(1 - f)

    since prompts arrive in a Poisson process: f = 1 - exp(-m). A step's first prompt is left out: prompts arrive as
    answers end, so it is a price of the tokens at any draft length, as prefill itself is.
    """
    alone, two_or_more = without_prompts(shape), fresh_prompts
    if fresh_prompts < 1.0:
        two_or_more += (1.0 - fresh_prompts) * np.log(1.0 - fresh_prompts)
    even_s = decode_s(costs, alone, 0.0)
    seconds = even_s + two_or_more * (pass_s(_varlen_row(costs, alone.n_batched), alone, 0.0) - even_s)
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
def price(
    costs: Costs,
    shape: Shape,
    node_s: Floats,
    lambda_over_plain: float,
    most: int,
    fresh_prompts: float,
    all_propose: bool,
) -> Price:
    """Seconds of a step of `shape`, which holds no proposals yet, with 0 to `most` proposals.

    The step is varlen if it holds a prompt, or if some requests have proposals and others none. A step of one request
    is uniform. lambda_over_plain: measured goodput / modelled goodput of plain decoding. fresh_prompts: P(the step
    holds prompts of requests that are not in `shape`). all_propose: every request that decodes in it may have
    proposals."""
    most = max(0, most)
    uneven, even = np.empty(most + 1), np.empty(most + 1)
    in_graph = int(max(0.0, min(most + 1.0, costs.graph - shape.n_batched + 1.0)))
    _fill(uneven[:in_graph], costs.target[VARLEN], shape, 0)
    _fill(uneven[in_graph:], costs.target[BEYOND], shape, in_graph)
    _fill(even[:in_graph], costs.target[UNIFORM], shape, 0)
    p_unequal = 1.0 if shape.n_prompt > 0.0 else fresh_prompts
    even[:in_graph] += p_unequal * (uneven[:in_graph] - even[:in_graph])
    even[in_graph:] = uneven[in_graph:]
    uneven[0] = even[0]
    if not all_propose:
        even[1:] = uneven[1:]
    elif shape.n_requests == 1.0:
        uneven[:] = even
    rate = _plain_rate(costs, shape, fresh_prompts) * lambda_over_plain
    first_s = token_s(_varlen_row(costs, shape.n_batched), shape.n_batched)
    return Price(uneven, even, node_s, rate, first_s)


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

    A drafter that is the target itself has the seconds of a pass without requests here; `asking_s` has the rest.
    context: (N,), context tokens of the requests that decode.
    """
    drafters, decoding = len(costs.drafts), float(len(context))
    first_s, later_s, token_s_of = np.zeros(drafters), np.zeros((drafters, widest)), np.zeros(drafters)
    for d in range(drafters):
        cost, read = costs.drafts[d], 0.0
        for tokens in context:
            read += read_tokens(tokens, costs.budgets[d])
        shape = later_pass(read, decoding, 1.0)
        if costs.budgets[d] > 0.0 and not costs.reads[d]:  # the target itself: see `asking_s`
            shape = Shape(0.0, 0.0, 0.0, 0.0, 0.0)
        if is_block(costs, d):
            first_s[d] = pass_s(cost[0], shape, 0.0)
            continue
        first_s[d] = pass_s(cost[0], shape, 0.0) + pass_s(cost[1], shape, 0.0)
        first_s[d] += _fed_s(cost, decoding, prompts * costs.hidden[d])
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
def _fed_s(costs: Floats, decoding: float, tokens: float) -> float:
    """Seconds that `tokens` more add to a first pass over `decoding` tokens, with the knee. costs: (2, 8) of a
    drafter."""
    seconds = 0.0
    for cost in costs:
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
def feeding_s(costs: Costs, missing: Ints, decoding: float) -> Floats:
    """(D, N): seconds that feeding all `missing` (D, N) tokens of a request adds to a first pass over `decoding`
    tokens; 0 for drafters that are not fed."""
    seconds = np.zeros(missing.shape)
    for d in np.flatnonzero(costs.reads):
        for i in range(missing.shape[1]):
            seconds[d, i] = _fed_s(costs.drafts[d], decoding, float(missing[d, i]))
    return seconds


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
def asking_s(costs: Costs, context: Ints) -> Floats:
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
