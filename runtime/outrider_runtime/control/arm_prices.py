"""What a step costs each request of an arm at full batch, by the latency model as corrected online.

Both arms of a canary are in the same steps, so wall time cannot tell them apart. With N decoding requests, v tokens
verified of each of the arm's requests on average, and T as the model has it, a request i of the arm pays

    T_target(N, 0) / N + (T_target(N, N v) - T_target(N, 0)) * v_i / (N v) + sum over its drafters of T_draft(N) / N,

so that the arm's requests pay n / N of what the step would take if all N were of the arm. What drafters read of prompts
and KV gaps is paid by the request that it is read of. N requests, D drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Batch, Bools, Floats, Ints
from outrider_runtime.control.draft_options import GAP_TOKENS
from outrider_runtime.control.plans import ArmPlan, Outcome
from outrider_runtime.control.step_times import (
    ABOVE,
    BATCHED,
    BEYOND,
    KNEE,
    UNIFORM,
    VARLEN,
    Costs,
    Shape,
    is_block,
    later_pass,
    pass_s,
)


class Credits(NamedTuple):
    """What a finished step gave each of its requests, and what it cost them."""

    tokens: Ints
    """(N,): of requests that decoded; 0 for others."""
    price_s: Floats
    """(N,): 0 for requests of no arm."""
    plain_s: Floats
    """(N,): seconds that plain decoding takes for the tokens."""
    speculates: Bools
    """(N,): whether a step cost the request more than a plain one: it had proposals, or a drafter ran for its arm."""
    plain_token_s: float
    """Seconds of a token by plain decoding: the step without proposals over its decoding requests; 0 where none."""
    is_counted: bool = True
    """False for probes, and while they have switched speculation off for all: such a step tells nothing of the arms."""

    @property
    def size_class(self) -> int:
        """Class of the number of decoding requests: 0 is none, then 1, 2 to 3, 4 to 7, and so on."""
        return int(np.count_nonzero(self.tokens)).bit_length()


def step_credits(outcome: Outcome, costs: Costs, *, is_counted: bool) -> Credits:
    batch, requests = outcome.batch, len(outcome.batch)
    assert batch.arm is not None
    accepted = np.bincount(outcome.forest.request[outcome.accepted], minlength=requests)
    verified = np.bincount(outcome.forest.request[outcome.verified], minlength=requests)
    verified = verified if outcome.places is None else outcome.places
    tokens = np.where(batch.decodes, np.minimum(1 + accepted, np.maximum(1, batch.left)), 0)
    plain, price_s = _plain_shape(batch), np.zeros(requests)
    plain_s = _target_s(costs, plain, 0.0, is_even=True)
    for arm in outcome.draft_plan.arms:
        own = batch.arm == arm.arm
        price_s += _target_prices(costs, plain, plain_s, own & batch.decodes, verified)
        price_s += _draft_prices(costs, outcome, own, arm)
    plain_token_s = plain_s / max(1.0, plain.n_requests)
    return Credits(tokens, price_s, tokens * plain_token_s, price_s > plain_token_s, plain_token_s, is_counted)


def _plain_shape(batch: Batch) -> Shape:
    """The target's pass over the requests that decode, a token each."""
    requests, context = float(batch.decodes.sum()), float(batch.context[batch.decodes].sum())
    return Shape(context, requests, requests, context / 1000)


def _target_s(costs: Costs, plain: Shape, proposals: float, *, is_even: bool) -> float:
    if plain.n_requests == 0.0:
        return 0.0
    query = plain.n_context_query * (1.0 + proposals / plain.n_requests)
    shape = Shape(plain.n_context, plain.n_batched + proposals, plain.n_requests, query)
    row = BEYOND if shape.n_batched > costs.graph else UNIFORM if is_even else VARLEN
    return pass_s(costs.target[row], shape, 0.0)


def _target_prices(costs: Costs, plain: Shape, plain_s: float, own: Bools, verified: Ints) -> Floats:
    """(N,). own: requests of the arm that decode."""
    lengths = verified[own]
    if not len(lengths):
        return np.zeros(len(own))
    proposals = plain.n_requests * float(lengths.mean())
    more_s = 0.0
    if proposals:
        more_s = _target_s(costs, plain, proposals, is_even=bool((lengths == lengths[0]).all())) - plain_s
    return np.where(own, plain_s / plain.n_requests + more_s * verified / max(1.0, proposals), 0.0)


def _draft_prices(costs: Costs, outcome: Outcome, own: Bools, arm: ArmPlan) -> Floats:
    """(N,): drafting at the end of the step. own: requests of the arm."""
    batch, plan = outcome.batch, outcome.draft_plan
    next_ones = batch.prompt_left == 0
    mine, prices = own & next_ones, np.zeros(len(own))
    scale = float(next_ones.sum()) / max(1, int(mine.sum()))
    for d in range(len(arm.passes)):
        asks, fed = (plan.drafter_order == d).any(axis=0) & mine, np.where(own, plan.feed[d], 0)
        of_step = np.where(mine, np.minimum(fed, np.where(batch.prompt > 0, 1, GAP_TOKENS)), 0)
        takers = asks | (of_step > 0)
        if takers.any():
            shape = _first_pass(batch.context[takers], float(of_step.sum()), scale, float(costs.budgets[d]))
            further = max(1, int(arm.passes[d])) - 1 if asks.any() else 0
            prices[mine] += _passes_s(costs, d, shape, further, asks=bool(asks.any())) / float(next_ones.sum())
        prices += (fed - of_step) * _read_token_s(costs.drafts[d], float(next_ones.sum() + (fed - of_step).sum()))
    return prices


def _first_pass(context: Ints, tokens: float, scale: float, budget: float) -> Shape:
    """A drafter's first pass over so many requests as if all were the arm's. context: of the arm's requests."""
    read = np.minimum(context, budget) if budget > 0.0 else context
    requests, cached = scale * len(context), scale * float(read.sum())
    return Shape(cached, max(requests, scale * tokens), requests, cached / 1000)


def _passes_s(costs: Costs, d: int, first: Shape, further: int, *, asks: bool) -> float:
    cost, later = costs.drafts[d], later_pass(first.n_context, first.n_requests, 1.0)
    if is_block(costs, d):
        return pass_s(cost[1], first, 0.0) + (pass_s(cost[0], later, 0.0) if asks else 0.0)
    seconds = pass_s(cost[0], first, 0.0) + pass_s(cost[1], first, 0.0)
    return seconds + (further * pass_s(cost[0], later, 0.0) if costs.passes[d] else 0.0)


def _read_token_s(cost: Floats, tokens: float) -> float:
    """Seconds of a token more in a first pass of so many. cost: (2, 8) of a drafter."""
    rows: Sequence[Floats] = list(cost)
    return sum(float(row[BATCHED] + (row[ABOVE] if tokens > row[KNEE] else 0.0)) for row in rows)


ARMS = 2
SIZES = 12
"""Classes of batch sizes, the last one for all larger batches."""
MOST_WEIGHT = 4.0
"""Bound of the weights: the first steps of a canary say little of the mix."""


class BatchMix:
    """Gives both arms of a draft canary the same mix of batch sizes.

    Speculation pays more in small batches than in large ones. Requests of the slower arm last longer, so that more of
    their tokens fall into the small batches at the end of a burst: its speed-up would look too good. Each request's
    step is therefore weighted by (share of both arms' requests in batches of this size) / (share of its arm's), as in
    post-stratification.
    """

    def __init__(self) -> None:
        self._decoded = np.zeros((ARMS, SIZES))
        """Decoding requests, summed over steps, by arm and class of size."""

    def balanced(self, made: Credits, arm: Ints) -> Credits:
        """Weight the seconds of a step. arm: (N,), as `Batch.arm`."""
        if not made.is_counted:
            return made
        decodes = made.tokens > 0
        size = min(made.size_class, SIZES - 1)
        for number in range(ARMS):
            self._decoded[number, size] += np.count_nonzero(decodes & (arm == number))
        weights = np.append(self._weights(size), 1.0)[arm]  # the last one: of no arm
        return made._replace(price_s=made.price_s * weights, plain_s=made.plain_s * weights)

    def _weights(self, size: int) -> Floats:
        """(2,), by arm."""
        of_size, of_arm = self._decoded[:, size], self._decoded.sum(axis=1)
        if not of_arm.all():
            return np.ones(ARMS)
        both = of_size.sum() / of_arm.sum()
        weights = both * of_arm / np.maximum(1.0, of_size)
        return np.asarray(np.clip(weights, 1 / MOST_WEIGHT, MOST_WEIGHT))
