"""What each drafter can propose for each request in the next step, and its price: of which a choice is made.

Shapes: D drafters, N requests, S slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.control import step_times
from outrider_runtime.control.acceptance import GUARANTEED_TOKENS, Counts, chain_paths
from outrider_runtime.control.batch import Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.settings import InForce
from outrider_runtime.control.slo import (
    Need,
    UnderWay,
    anyone_late,
    behind,
    clocks,
    expected_rest,
    later,
    needed,
    none_behind,
)
from outrider_runtime.control.step_times import Costs, next_step, room, this_step
from outrider_runtime.control.trees import Beams, beams, most_gained
from outrider_runtime.control.value import NO_SECONDS, Price

GAP_TOKENS = 16
"""Largest KV gap, in tokens, that a drafter proposes over: any step, or a probe, leaves as much, and the first pass
covers it."""
STEP_TOKENS = 2.0
"""Tokens that a request is assumed to get in a step that speculates."""
EVERY_GAP: Ints = np.zeros((0, 0), np.int64)
"""Stands for KV gaps (D, N) that can all be fed before the drafter proposes."""


class DraftOptions(NamedTuple):
    """What the drafters offer for the next step. Requests are the last axis, since loops over them take most time."""

    paths: Floats
    """(D, K, N): probability that the target accepts a chain of 1..K; 0 past the tokens that the request may still
    produce, and where the drafter cannot serve it."""
    hit_rates: Floats
    """(D, K): hit rate: probability that the drafter has a proposal of that depth; for a model, of any depth."""
    autoregressive: Bools
    """(D,): every token is a pass."""
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
    use_s: Floats = NO_SECONDS
    """(D, N): seconds that a request adds to each pass of a drafter that it uses; (0, 0) if every drafter runs over the
    whole batch anyway."""
    scores_placeholders: bool = False
    """See `Settings`."""
    catch_up_s: Floats = NO_SECONDS
    """(D, N): price of a KV gap: seconds of feeding it, spread over the steps that the answer is assumed to go on for;
    (0, 0) without gaps."""


class StepLimits(NamedTuple):
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
    scores_placeholders: bool
    """See `Settings`."""


def step_limits(
    batch: Batch, force: InForce, lambda_over_plain: float, under_way: UnderWay, longest: int
) -> tuple[Any, ...]:  # fmt: skip
    """Fields of `StepLimits`, in a plain tuple: compiled calls unpack it faster than a named one."""
    return (
        force.usable, force.needs_kv, force.tpots_s, longest, batch.token_budget, batch.free_kv_tokens,
        lambda_over_plain, under_way.expected, under_way.drafts_s, force.scores_placeholders,
    )  # fmt: skip


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
def offered(batch: Columns, known: Counts, costs: Costs, limits: StepLimits, closed: Ints) -> tuple[Ints, DraftOptions]:
    """Rows that may be drafted for, and their `DraftOptions`. closed: (D, N), tokens of KV gaps that are fed
    first; EVERY_GAP: as many as it takes."""
    rows, base = can_ask(batch), next_step(batch, limits.token_budget)
    paths, hits = chain_paths(known, batch, rows, limits.usable, limits.longest, GUARANTEED_TOKENS)
    taken = int(base.n_batched)  # by the step under way
    budget = room(base, limits.token_budget, limits.free_kv_tokens - taken)
    context, most = batch.context[rows], min(budget, len(rows) * limits.longest)
    node_s = step_times.node_s(costs, context, 0.0)
    price = step_times.price(costs, base, node_s, limits.lambda_over_plain, most)
    wider = beams(known.places, known.acceptance_rates, known.widest)
    first_s, pass_s, token_s = step_times.draft_columns(
        costs, context, float(batch.prompt.sum()), wider.places.shape[2]
    )
    this_step_s = step_times.decode_s(costs, this_step(batch), 0.0) + limits.drafts_s
    use_s, catch_up_s = step_times.use_s(costs, context), _catch_up_s(paths, batch, rows, costs, limits, closed)
    need = _need(batch, rows, paths, this_step_s, price.target_s[0] + limits.drafts_s, limits, wider)
    options = DraftOptions(
        paths, hits, known.autoregressive, known.stands_in, first_s, pass_s, token_s, price, limits.longest, budget,
        need, wider, use_s, limits.scores_placeholders, catch_up_s,
    )  # fmt: skip
    return rows, options


@compiled
def _catch_up_s(paths: Floats, batch: Columns, rows: Ints, costs: Costs, limits: StepLimits, closed: Ints) -> Floats:
    """`DraftOptions.catch_up_s`. Sets the `paths` (D, K, N) over gaps that are not fed now to 0: of drafters that read
    the target's hidden states, which are gone after the step, and of gaps that are not `closed`."""
    seconds, any_gap = np.zeros((len(paths), len(rows))), False
    steps = expected_rest(batch.left[rows] * 1.0, batch.emitted[rows] * 1.0) / STEP_TOKENS
    for d in np.flatnonzero(limits.needs_kv):
        for n in range(len(rows)):
            i, missing = rows[n], batch.missing[d, rows[n]]
            if missing <= GAP_TOKENS:
                continue
            if costs.hidden[d] or (closed.size > 0 and closed[d, i] < missing):
                paths[d, :, n] = 0.0
                continue
            earlier = float(max(0, missing - batch.prompt[i]))  # `first_s` has the prompt of this step
            seconds[d, n] = step_times.feeding_s(costs, d, earlier, float(len(rows))) / max(1.0, steps[n])
            any_gap = True
    return seconds if any_gap else seconds[:0, :0].copy()


@compiled
def _need(
    batch: Columns, rows: Ints, paths: Floats, this_step_s: float, next_step_s: float, limits: StepLimits, beams: Beams
) -> Need:
    """Requests that will be late when the next step begins. this_step_s: seconds of the step under way, its prompts
    included; next_step_s: seconds of a plain step after it."""
    if not anyone_late(batch, limits.tpots_s, this_step_s + next_step_s):
        return none_behind(len(rows))
    most = 1.0 + most_gained(paths, beams)
    state = later(clocks(batch, rows, limits.tpots_s), this_step_s, 1.0 + limits.expected[batch.slot[rows]])
    return Need(behind(state, next_step_s, most), needed(state, 0.0) - 1.0, 1.0 / state.tpot_s)
