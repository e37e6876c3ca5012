"""What each drafter can propose for each request in the next step, and its price: the `Pool` that a choice is made of.

Shapes: D drafters, N requests, S slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.control.acceptance.estimate import GUARANTEED_TOKENS, chain_paths
from outrider_runtime.control.acceptance.trees import Beams, beams, most_gained
from outrider_runtime.control.acceptance.trials import ANY, Counts
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost import step_times
from outrider_runtime.control.cost.model import next_step, room, this_step
from outrider_runtime.control.cost.step_times import Costs
from outrider_runtime.control.data.batch import Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.settings import InForce
from outrider_runtime.control.slo import Need, UnderWay, anyone_late, behind, clocks, later, needed, none_behind
from outrider_runtime.control.value import WHOLE_BATCH, Price

GAP_TOKENS = 16
"""Largest KV gap, in tokens, that a drafter proposes over: any step, or a probe, leaves as much, and the first pass
covers it."""


class Pool(NamedTuple):
    """What the drafters offer for the next step. Requests are the last axis, since loops over them take most time."""

    paths: Floats
    """(D, K, N): probability that the target accepts a chain of 1..K; 0 past the tokens that the request may still
    produce, and where the drafter cannot serve it."""
    offers: Floats
    """(D, K): hit rate: probability that the drafter has a proposal of that depth; for a model, of any depth."""
    passes: Bools
    """(D,): autoregressive drafters: every token is a pass."""
    stands_in: Bools
    """(D,): see `settings.Drafter`."""
    first_s: Floats
    """(D,): seconds of the first pass, or of a lookup's call."""
    pass_s: Floats
    """(D, W): seconds of each pass after the first, by the width of trees; 0 for a lookup."""
    token_s: Floats
    """(D,): seconds that each verified token adds to the drafter's next first pass; 0 for one that is not fed."""
    price: Price
    longest: int
    """Largest draft length."""
    budget: int
    """Most proposals that the step may hold."""
    need: Need
    beams: Beams
    asking_s: Floats = WHOLE_BATCH
    """(D, N): seconds that a request adds to each pass of a drafter that it uses; (0, 0) if every drafter runs over the
    whole batch anyway."""
    scores_placeholders: bool = False
    """See `Settings`."""


class Terms(NamedTuple):
    """Limits and estimates for a step that come neither from its batch nor from what was learned."""

    usable: Bools
    """(D,): drafters that may run."""
    needs_kv: Bools
    """(D,): see `settings.Drafter`."""
    tpots_s: Floats
    """Seconds per token of each class; the last one, infinite, for requests without a class."""
    longest: int
    """Largest draft length."""
    token_budget: int
    free_kv_tokens: int
    lambda_over_plain: float
    """Lambda / modelled goodput of plain decoding."""
    expected: Floats
    """(S,): tokens beyond the bonus token that the step under way is expected to give, by slot."""
    drafts_s: float
    """Seconds of its drafts."""
    fresh_prompts: float
    """Probability that the step holds prompts of requests that are not in the batch."""
    scores_placeholders: bool
    """See `Settings`."""


def terms(
    batch: Batch, force: InForce, lambda_over_plain: float, under_way: UnderWay, longest: int, fresh_prompts: float
) -> tuple[Any, ...]:  # fmt: skip
    """Fields of `Terms`, in a plain tuple: compiled calls unpack it faster than a named one."""
    return (
        force.usable, force.needs_kv, force.tpots_s, longest, batch.token_budget, batch.free_kv_tokens,
        lambda_over_plain, under_way.expected, under_way.drafts_s, fresh_prompts, force.scores_placeholders,
    )  # fmt: skip


@compiled
def served(missing: int, closed: int, needs_kv: bool) -> bool:
    """Whether a drafter can propose for a request: its cache lacks `missing` tokens, and it is fed `closed` of them."""
    return not needs_kv or missing <= GAP_TOKENS or closed >= missing


@compiled
def can_ask(batch: Columns) -> Ints:
    """Rows of the requests that decode in the next step and have tokens left for proposals."""
    rows, count = np.empty(len(batch.left), np.int64), 0
    for i in range(len(batch.left)):
        if batch.prompt_left[i] == 0 and batch.left[i] > GUARANTEED_TOKENS:
            rows[count] = i
            count += 1
    return rows[:count]


@compiled
def offered(batch: Columns, known: Counts, costs: Costs, limits: Terms, closed: Ints) -> tuple[Ints, Pool]:
    """Rows that may be drafted for, and their `Pool`. closed: (D, N), tokens of KV gaps that are fed first."""
    rows, base = can_ask(batch), next_step(batch, limits.token_budget)
    paths, offers = chain_paths(known, batch, rows, limits.usable, limits.longest, GUARANTEED_TOKENS)
    taken = int(base.n_batched)  # by the step under way
    budget = room(base, limits.token_budget, limits.free_kv_tokens - taken)
    context, most = batch.context[rows], min(budget, len(rows) * limits.longest)
    all_propose = len(rows) == int(base.n_requests)
    node_s = step_times.node_s(costs, context, 0.0)
    price = step_times.price(costs, base, node_s, limits.lambda_over_plain, most, limits.fresh_prompts, all_propose)
    wider = beams(known.places, np.ascontiguousarray(known.acceptance_rates[:, :, ANY]), known.widest)
    first_s, pass_s, token_s = step_times.draft_columns(
        costs, context, float(batch.prompt.sum()), wider.places.shape[2]
    )
    this_step_s = step_times.decode_s(costs, this_step(batch), 0.0) + limits.drafts_s
    need = _need(batch, rows, paths, this_step_s, price.varlen_s[0] + limits.drafts_s, limits, wider)
    for d in range(len(paths)):
        for n in range(len(rows)):
            if not served(batch.missing[d, rows[n]], closed[d, rows[n]], limits.needs_kv[d]):
                paths[d, :, n] = 0.0
    asking_s = step_times.asking_s(costs, context)
    pool = Pool(
        paths, offers, known.passes, known.stands_in, first_s, pass_s, token_s, price, limits.longest, budget, need,
        wider, asking_s, limits.scores_placeholders,
    )  # fmt: skip
    return rows, pool


@compiled
def _need(
    batch: Columns, rows: Ints, paths: Floats, this_step_s: float, next_step_s: float, limits: Terms, beams: Beams
) -> Need:
    """Requests that will be late when the next step begins. this_step_s: seconds of the step under way, its prompts
    included; next_step_s: seconds of a plain step after it."""
    if not anyone_late(batch, limits.tpots_s, this_step_s + next_step_s):
        return none_behind(len(rows))
    most = 1.0 + most_gained(paths, beams)
    state = later(clocks(batch, rows, limits.tpots_s), this_step_s, 1.0 + limits.expected[batch.slot[rows]])
    return Need(behind(state, next_step_s, most), needed(state, 0.0) - 1.0, 1.0 / state.tpot_s)
