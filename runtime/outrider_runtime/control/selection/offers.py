"""What the drafters offer for the next step, and to whom: the `Pool` that a choice is made from.

Shapes: D drafters, N requests, S slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.control.acceptance.estimate import OF_THIS_STEP, chain_paths
from outrider_runtime.control.acceptance.trees import Beams, beams, most_gained
from outrider_runtime.control.acceptance.trials import ANY, Counts
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost import step_times
from outrider_runtime.control.cost.model import next_step, room, this_step
from outrider_runtime.control.cost.step_times import Costs
from outrider_runtime.control.data.batch import Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.settings import InForce
from outrider_runtime.control.slo import Need, UnderWay, anyone_late, behind, clocks, later, needed, nobody_behind
from outrider_runtime.control.value import WHOLE_BATCH, Price

HOLE_TOKENS = 16
"""So little is missing after any step, and after a probe: no more than the first pass covers."""


class Pool(NamedTuple):
    """What the drafters offer for the next step. Requests are last, as loops over them are what takes the time."""

    paths: Floats
    """(D, K, N): probability that the target accepts a chain of 1..K; 0 past a request's room, and where the drafter
    cannot serve it."""
    offers: Floats
    """(D, K): probability that there is a proposal of that depth; of a model, any."""
    passes: Bools
    """(D,): every token is a pass."""
    stands_in: Bools
    """(D,): see `settings.Drafter`."""
    first_s: Floats
    """(D,): seconds of the first pass, or of a lookup's call."""
    pass_s: Floats
    """(D, W): seconds of each pass after the first, by the width of trees; 0 for a lookup."""
    token_s: Floats
    """(D,): what each token that is verified costs in the drafter's next first pass; 0 for one that reads nothing."""
    price: Price
    longest: int
    """Draft length."""
    budget: int
    """Most proposals that the step may hold."""
    need: Need
    beams: Beams
    asking_s: Floats = WHOLE_BATCH
    """(D, N): seconds by which a request lengthens each pass that it asks for; (0, 0) where every drafter that runs
    runs over the whole batch."""
    scores_placeholders: bool = False
    """See `Settings`."""


class Terms(NamedTuple):
    """What holds for a step, beside its batch and what was learned."""

    usable: Bools
    """(D,): drafters that may run."""
    needs_kv: Bools
    """(D,): see `settings.Drafter`."""
    tpots_s: Floats
    """By class; the last one, infinite, for none."""
    longest: int
    """Draft length."""
    token_budget: int
    free_kv_tokens: int
    goodput: float
    """By that of plain decoding."""
    expected: Floats
    """(S,): tokens beyond the bonus token that the step under way is expected to give, by slot."""
    drafts_s: float
    """Seconds of its drafts."""
    fresh_prompts: float
    """How likely the step holds prompts of requests that are not in the batch."""
    scores_placeholders: bool
    """See `Settings`."""


def terms(
    batch: Batch, force: InForce, goodput: float, under_way: UnderWay, longest: int, fresh_prompts: float
) -> tuple[Any, ...]:  # fmt: skip
    """As `Terms`, in a plain tuple, which a call unpacks faster."""
    return (
        force.usable, force.needs_kv, force.tpots_s, longest, batch.token_budget, batch.free_kv_tokens, goodput,
        under_way.expected, under_way.drafts_s, fresh_prompts, force.scores_placeholders,
    )  # fmt: skip


@compiled
def served(missing: int, closed: int, needs_kv: bool) -> bool:
    """A drafter that misses so many tokens of a request, of which it is fed `closed` before, can propose for it."""
    return not needs_kv or missing <= HOLE_TOKENS or closed >= missing


@compiled
def can_ask(batch: Columns) -> Ints:
    """Rows of the requests that decode in the next step and have tokens left for proposals."""
    rows, count = np.empty(len(batch.left), np.int64), 0
    for i in range(len(batch.left)):
        if batch.prompt_left[i] == 0 and batch.left[i] > OF_THIS_STEP:
            rows[count] = i
            count += 1
    return rows[:count]


@compiled
def offered(batch: Columns, known: Counts, costs: Costs, now: Terms, closed: Ints) -> tuple[Ints, Pool]:
    """Rows that may ask, and what they are offered. closed: (D, N), tokens of holes that draft models are fed first."""
    rows, base = can_ask(batch), next_step(batch, now.token_budget)
    paths, offers = chain_paths(known, batch, rows, now.usable, now.longest, OF_THIS_STEP)
    taken = int(base.n_batched)  # by the step under way
    budget = room(base, now.token_budget, now.free_kv_tokens - taken)
    context, most = batch.context[rows], min(budget, len(rows) * now.longest)
    all_propose = len(rows) == int(base.n_requests)
    node_s = step_times.node_s(costs, context, 0.0)
    price = step_times.price(costs, base, node_s, now.goodput, most, now.fresh_prompts, all_propose)
    wider = beams(known.places, np.ascontiguousarray(known.hazards[:, :, ANY]), known.widest)
    first_s, pass_s, token_s = step_times.draft_columns(
        costs, context, float(batch.prompt.sum()), wider.places.shape[2]
    )
    this_step_s = step_times.decode_s(costs, this_step(batch), 0.0) + now.drafts_s
    need = _need(batch, rows, paths, this_step_s, price.varlen_s[0] + now.drafts_s, now, wider)
    for d in range(len(paths)):
        for n in range(len(rows)):
            if not served(batch.missing[d, rows[n]], closed[d, rows[n]], now.needs_kv[d]):
                paths[d, :, n] = 0.0
    asking_s = step_times.asking_s(costs, context)
    pool = Pool(
        paths, offers, known.passes, known.stands_in, first_s, pass_s, token_s, price, now.longest, budget, need, wider,
        asking_s, now.scores_placeholders,
    )  # fmt: skip
    return rows, pool


@compiled
def _need(
    batch: Columns, rows: Ints, paths: Floats, this_step_s: float, next_step_s: float, now: Terms, beams: Beams
) -> Need:
    """Requests that will be behind when the next step begins. this_step_s: of the step under way, its prompts included;
    next_step_s: of a plain step after it."""
    if not anyone_late(batch, now.tpots_s, this_step_s + next_step_s):
        return nobody_behind(len(rows))
    most = 1.0 + most_gained(paths, beams)
    state = later(clocks(batch, rows, now.tpots_s), this_step_s, 1.0 + now.expected[batch.slot[rows]])
    return Need(behind(state, next_step_s, most), needed(state, 0.0) - 1.0, 1.0 / state.tpot_s)
