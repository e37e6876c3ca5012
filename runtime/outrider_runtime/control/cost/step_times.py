"""Predictions of what steps and drafts take: `Costs`, and what compiled code reads off them.

Shapes: D drafters, N requests, T the most proposals that are looked at, W nodes at a depth of a tree.
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
    """Step times as compiled code predicts them. D drafters."""

    target: Floats
    """(3, 8): of each mode, corrected."""
    graph: float
    """Batched tokens of the largest graph."""
    drafts: Floats
    """(D, 2, 8): of a pass, and of what the first one costs beyond it, corrected."""
    passes: Bools
    """(D,): every token is a pass."""
    reads: Bools
    """(D,): it must be fed committed tokens."""
    hidden: Bools
    """(D,): it reads the target's hidden states."""
    budgets: Floats
    """(D,): tokens of a request that a pass reads at most; 0: all."""


@compiled
def _varlen_row(costs: Costs, tokens: float) -> Floats:
    """Coefficients of a step of unequal lengths. Past the largest graph other ones hold."""
    row: Floats = costs.target[BEYOND if tokens > costs.graph else VARLEN]
    return row


@compiled
def decode_s(costs: Costs, shape: Shape, proposals: float) -> float:
    """Seconds of the target's pass of a shape and its proposals, of unequal lengths if several requests have some."""
    tokens = shape.n_batched + proposals
    even = shape.n_prompt == 0.0 and (proposals == 0.0 or shape.n_requests == 1.0) and tokens <= costs.graph
    return pass_s(costs.target[UNIFORM] if even else _varlen_row(costs, tokens), shape, proposals)


@compiled
def _plain_rate(costs: Costs, shape: Shape, fresh_prompts: float) -> float:
    """Tokens a second of requests that decode, nothing proposed; 0 while no cost is known.

    With f the share of steps that fresh prompts join, whose lengths are unequal, a plain step takes

        T_uniform + P(two or more prompts) * (T_varlen - T_uniform),  P = f + (1 - f) * ln(1 - f)

    as prompts arrive like Poisson's: f = 1 - exp(-m). First prompts come with every draft length, the more the more
    answers end, so their price is the tokens', as prompt work is.
    """
    alone, two_or_more = without_prompts(shape), fresh_prompts
    if fresh_prompts < 1.0:
        two_or_more += (1.0 - fresh_prompts) * np.log(1.0 - fresh_prompts)
    even_s = decode_s(costs, alone, 0.0)
    seconds = even_s + two_or_more * (pass_s(_varlen_row(costs, alone.n_batched), alone, 0.0) - even_s)
    return float(alone.n_requests / seconds) if seconds > 0.0 else 0.0


@compiled
def prompt_s(costs: Costs, shape: Shape, proposals: float, tokens: float) -> float:
    """Seconds by which `tokens` of prompts lengthen a step of `shape` that verifies `proposals`."""
    longer = Shape(
        shape.n_context, shape.n_batched + tokens, shape.n_requests, shape.n_context_query, shape.n_prompt + tokens
    )
    seconds = decode_s(costs, longer, proposals) - decode_s(costs, shape, proposals)
    return float(max(seconds, costs.target[VARLEN, BATCHED] * tokens))


@compiled
def _fill(seconds: Floats, cost: Floats, shape: Shape, first: int) -> None:
    """Seconds of `shape` with `first`, `first` + 1, .. proposals."""
    fixed_s = pass_s(cost, shape, 0.0) - cost[ABOVE] * max(0.0, shape.n_batched - cost[KNEE])
    for n in range(len(seconds)):
        above = max(0.0, shape.n_batched + first + n - cost[KNEE])
        seconds[n] = fixed_s + (cost[BATCHED] + cost[LOGITS]) * (first + n) + cost[ABOVE] * above


@compiled
def node_s(costs: Costs, context: Ints, read_s: float) -> Floats:
    """(N,): see `Price`. context: (N,), cached tokens of the requests whose nodes are priced. read_s: seconds that a
    verified token takes in the drafters' next first passes."""
    seconds = np.empty(len(context))
    for i in range(len(context)):
        seconds[i] = costs.target[VARLEN, QUERY] * context[i] / 1000 + read_s
    return seconds


@compiled
def price(
    costs: Costs, shape: Shape, node_s: Floats, goodput: float, most: int, fresh_prompts: float, all_propose: bool
) -> Price:
    """What a step takes around `shape`, which holds no proposals yet, with up to `most` of them.

    Lengths are unequal if the step holds a prompt, and with proposals if a request has none. One request is uniform.

    goodput: measured / modelled of plain decoding. fresh_prompts: how likely the step holds prompts of requests that
    are not in `shape`. all_propose: every request that decodes in it may have proposals.
    """
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
    rate = _plain_rate(costs, shape, fresh_prompts) * goodput
    first_s = token_s(_varlen_row(costs, shape.n_batched), shape.n_batched)
    return Price(uneven, even, node_s, rate, first_s)


@compiled
def read_tokens(context: int, budget: float) -> float:
    """Context tokens of a request that a pass reads. budget: most; 0: all."""
    return min(float(context), budget) if budget > 0.0 else float(context)


@compiled
def draft_columns(costs: Costs, context: Ints, prompts: float, widest: int) -> tuple[Floats, Floats, Floats]:
    """Seconds: (D,) of the first pass over a token a request, or a call, and over `prompts` tokens; (D, W) of each
    later pass, by the width of the trees; (D,) of a token in a first pass, for drafters that read. For the target
    itself, what a pass takes without requests.

    context: (N,), cached tokens of the requests that decode.
    """
    drafters, decoding = len(costs.drafts), float(len(context))
    first_s, more_s, each_s = np.zeros(drafters), np.zeros((drafters, widest)), np.zeros(drafters)
    for d in range(drafters):
        cost, read = costs.drafts[d], 0.0
        for tokens in context:
            read += read_tokens(tokens, costs.budgets[d])
        shape = later_pass(read, decoding, 1.0)
        if costs.budgets[d] > 0.0 and not costs.reads[d]:  # its requests have a price each
            shape = Shape(0.0, 0.0, 0.0, 0.0, 0.0)
        if is_block(costs, d):
            first_s[d] = pass_s(cost[0], shape, 0.0)
            continue
        first_s[d] = pass_s(cost[0], shape, 0.0) + pass_s(cost[1], shape, 0.0)
        first_s[d] += _fed_s(cost, decoding, prompts * costs.hidden[d])
        each_s[d] = (token_s(cost[0], decoding) + token_s(cost[1], decoding)) * costs.reads[d]
        for w in range(widest if costs.passes[d] else 0):
            more_s[d, w] = pass_s(cost[0], later_pass(shape.n_context, shape.n_requests, w + 1.0), 0.0)
    return first_s, more_s, each_s


@compiled
def is_block(costs: Costs, d: int) -> bool:
    """One pass over hidden states proposes all tokens. It is fed in every step, so asking it costs the pass alone, and
    feeding it costs what `costs.drafts[d, 1]` says."""
    return bool(costs.hidden[d] and not costs.passes[d])


@compiled
def _fed_s(costs: Floats, decoding: float, tokens: float) -> float:
    """Seconds by which a first pass over `decoding` tokens grows with `tokens` more, most of which are above the knee.
    costs: (2, 8) of a drafter."""
    seconds = 0.0
    for cost in costs:
        bent = max(0.0, decoding + tokens - cost[KNEE]) - max(0.0, decoding - cost[KNEE])
        seconds += cost[BATCHED] * tokens + cost[ABOVE] * bent
    return seconds


@compiled
def fed_token_s(costs: Costs, d: int) -> float:
    """Seconds that a token more adds to a drafter's first pass at most, past its knee."""
    seconds = 0.0
    for row in range(2):
        seconds += costs.drafts[d, row, BATCHED] + costs.drafts[d, row, ABOVE]
    return float(seconds)


@compiled
def feeding_s(costs: Costs, missing: Ints, decoding: float) -> Floats:
    """(D, N): seconds by which a first pass over `decoding` tokens grows with all that is `missing` (D, N) of one
    request; 0 of drafters that read nothing."""
    seconds = np.zeros(missing.shape)
    for d in np.flatnonzero(costs.reads):
        for i in range(missing.shape[1]):
            seconds[d, i] = _fed_s(costs.drafts[d], decoding, float(missing[d, i]))
    return seconds


@compiled
def later_pass(context: float, requests: float, width: float) -> Shape:
    """A draft's later pass over `width` nodes of each request."""
    return Shape(context, width * requests, requests, width * context / 1000, 0.0)


@compiled
def _above_s(cost: Floats, requests: int) -> float:
    """A request's part of what tokens above the knee cost if all requests ask, as it is not known yet which do. cost:
    (8,)"""
    return float(cost[ABOVE] * max(0.0, requests - cost[KNEE]) / max(1, requests))


@compiled
def asking_s(costs: Costs, context: Ints) -> Floats:
    """(D, N): seconds by which a request of `context` (N,) tokens lengthens each pass that it asks for; 0 for drafters
    that run over the whole batch anyway. (0, 0) if all do."""
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
    """What a verified token costs in the next first passes of those drafters that propose, `lengths` (D,)."""
    seconds = 0.0
    for d in range(len(costs.drafts)):
        if costs.reads[d] and lengths[d] > 0 and not is_block(costs, d):
            seconds += token_s(costs.drafts[d, 0], decoding) + token_s(costs.drafts[d, 1], decoding)
    return seconds
