"""The joint choice of drafters: which run, how many passes each makes, how wide, and which requests use which.

The worth of a plan is the sum of what each request gains with the drafter that suits it best, less the drafters' fixed
costs once. A lookup is one call for any length. A request that it misses is served by a model, if one runs: the request
then has two drafters, in order of preference. Depth and width of trees are chosen by the same argmax, where AdaServe
(section 5.2) has a rule: a node of a beam counts if it pays for its token, as in a chain. k = 0 is always a candidate,
and wins a tie.

Shapes: D drafters, V variants (see `candidates`), N decoding requests, K positions, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import NO_DRAFTER, Ints
from outrider_runtime.control.selection.candidates import Candidates, Variants, one_drafter_moves, variants
from outrider_runtime.control.selection.offers import Pool
from outrider_runtime.control.selection.sharing import (
    GAIN,
    Share,
    fill_chain,
    fill_tree,
    longest,
    proposals,
    share_evenly,
    share_lookups,
    share_models,
    share_placeholders,
    whole_chains,
)
from outrider_runtime.control.slo import least_gains, shortfall
from outrider_runtime.control.value import expected_s, worth

EQUAL_SHORTFALL = 0.02
"""Tokens per late request: choices whose shortfalls differ by less than this are compared by worth alone."""


MOST_MOVES = 2
"""Most moves of the search / variants: one that takes longer is going in circles between equal plans."""


class Choice(NamedTuple):
    passes: Ints
    """(D,): draft length of each drafter, or the depth of its trees; 0: it does not propose."""
    widths: Ints
    """(D,): width of its trees; 1: a chain."""
    drafter_order: Ints
    """(2, N): drafters of each request, in order of preference; NO_DRAFTER."""
    value: float
    """`E[tokens] - lambda * T_step`, bonus tokens left out."""
    plain_value: float
    """`value` of k = 0."""
    for_slo: bool = False
    """Some request is late: goodput alone might have chosen otherwise."""
    runs: bool = False
    """Some drafter proposes."""
    drafts_s: float = 0.0
    """Seconds of the drafts."""
    extra_cost_tokens: float = 0.0
    """`lambda * (T_step - T_plain)`."""
    has_gaps: bool = False
    """Some draft model cannot propose for some request, since its cache has a KV gap."""
    lambda_over_plain: float = 1.0
    """Lambda of this choice / modelled goodput of plain decoding."""

    @property
    def gain(self) -> float:
        """Tokens that speculation gains in this step beyond its cost; 0 when k = 0 is the choice."""
        return self.value - self.plain_value


def plain_choice(drafters: int, requests: int) -> Choice:
    """The choice of k = 0."""
    none = np.zeros(drafters, np.int64)
    return Choice(none, none + 1, np.full((2, requests), NO_DRAFTER), 0.0, 0.0)


def choose(pool: Pool) -> Choice:
    """The best set of drafters, passes, widths and requests; k = 0 unless another plan is worth more.

    Greedy search: from k = 0 it takes the best move, which gives one drafter another length, until no move helps. This
    is exact for one drafter if every verified token costs the same. Several drafters' gains overlap while their costs
    add up, so each further drafter adds less: a plan that no single move improves is seldom far from the best.
    """
    return best_choice(pool, variants(pool.passes, pool.stands_in, pool.beams.widest), False, 1.0)


@compiled
def best_choice(pool: Pool, weighed: Variants, has_gaps: bool, lambda_over_plain: float) -> Choice:
    """has_gaps, lambda_over_plain: see `Choice`."""
    price, for_slo, (drafters, _, requests) = pool.price, bool(pool.need.behind.any()), pool.paths.shape
    plain = float(-price.rate * price.varlen_s[0])
    passes, widths = np.zeros(drafters, np.int64), np.ones(drafters, np.int64)
    order = np.full((2, requests), NO_DRAFTER)
    if pool.paths.size == 0 or not pool.longest:
        return Choice(passes, widths, order, plain, plain, for_slo, False, 0.0, 0.0, has_gaps, lambda_over_plain)
    drafter, width = weighed.drafter, weighed.width
    best, lengths, variant_order, drafts_s = _choose(pool, weighed)
    if not lengths.max() or (not for_slo and best.value <= plain):
        return Choice(passes, widths, order, plain, plain, for_slo, False, 0.0, 0.0, has_gaps, lambda_over_plain)
    extra_cost_tokens = price.rate * (best.step_s - price.varlen_s[0])
    for v in np.flatnonzero(lengths):
        passes[drafter[v]], widths[drafter[v]] = lengths[v], width[v]
    for rank in range(2):
        for i in range(requests):
            v = variant_order[rank, i]
            order[rank, i] = drafter[v] if v != NO_DRAFTER else NO_DRAFTER
    return Choice(
        passes,
        widths,
        order,
        best.value,
        plain,
        for_slo,
        True,
        drafts_s,
        extra_cost_tokens,
        has_gaps,
        lambda_over_plain,
    )


class _Best(NamedTuple):
    passes: Ints
    uniform: bool
    value: float
    step_s: float


class _Chosen(NamedTuple):
    best: _Best
    lengths: Ints
    """(V,): the longest proposal that pays for some request, of each variant."""
    order: Ints
    """(2, N): variants that each request uses, in order of preference."""
    drafts_s: float


@compiled
def _choose(pool: Pool, variants: Variants) -> _Chosen:
    (_, positions, requests), drafter, models = pool.paths.shape, variants.drafter, variants.models
    share = Share(
        np.zeros((3, len(drafter), positions + 1, requests)), np.full(len(drafter), np.nan),
        least_gains(pool.need, pool.price.varlen_s[0]), np.empty((2, requests), np.int64),
        whole_chains(pool.paths, pool.offers), np.empty((5, requests)),
    )  # fmt: skip
    weigh_uniform = bool((pool.price.uniform_s < pool.price.varlen_s).any())
    best = _Best(np.zeros(len(drafter), np.int64), False, -np.inf, 0.0)
    for _ in range(MOST_MOVES * len(drafter)):
        moves = one_drafter_moves(best.passes, best.uniform, variants, pool.longest, positions, weigh_uniform)
        before, best = best, _best(pool, variants, moves, share)
        if before.uniform == best.uniform and (before.passes == best.passes).all():
            break
    _best(pool, variants, Candidates(best.passes.reshape(1, -1), np.full(1, best.uniform)), share)
    lengths = longest(share, models, best.passes, pool.scores_placeholders)
    return _Chosen(best, lengths, share.order, _drafts_s(pool, variants, lengths, share.order))


@compiled
def _best(pool: Pool, variants: Variants, moves: Candidates, share: Share) -> _Best:
    """The move of the highest worth among those whose shortfall for late requests is about the smallest; the first of
    equal ones. share: scratch space, left as the last move sets it."""
    rows, uniform = moves.rows, moves.uniform
    price, need, late = pool.price, pool.need, pool.need.behind.any()
    values, short, seconds = np.full(len(rows), -np.inf), np.full(len(rows), np.inf), np.zeros(len(rows))
    most = min(pool.budget, len(price.varlen_s) - 1)
    for c in range(len(rows)):
        possible, next_s = _shared(pool, variants, rows[c], uniform[c], share)
        if not possible:
            continue
        tokens, none, nodes_s = proposals(share, price.node_s, next_s)
        if tokens > most:
            continue
        target_s = price.uniform_s[int(tokens)] if uniform[c] else expected_s(price.varlen_s, tokens, none)
        step_s = _drafts_s(pool, variants, rows[c], share.order) + target_s
        seconds[c] = step_s + nodes_s
        values[c] = worth(share.per_request[GAIN].sum(), seconds[c], price.rate)
        short[c] = shortfall(share.per_request[GAIN], need, step_s) if late else 0.0
    values[short > short.min() + EQUAL_SHORTFALL * need.behind.sum()] = -np.inf
    best = values.argmax()
    return _Best(rows[best], uniform[best], values[best], seconds[best])


@compiled
def _shared(pool: Pool, variants: Variants, passes: Ints, uniform: bool, share: Share) -> tuple[bool, float]:
    """Set `share` to what each request gets if the drafters run with `passes` (V,). Returns whether that is possible,
    and the seconds that a verified token takes in the drafters' next first passes."""
    next_s, drafter = 0.0, variants.drafter
    for v in range(len(passes)):
        next_s += pool.token_s[drafter[v]] if passes[v] > 0 else 0.0
    if uniform:
        return share_evenly(pool, share, drafter, passes), next_s
    for v in range(len(passes)):
        if passes[v] > 0 and share.read_s[v] != next_s:
            share.read_s[v] = next_s
            _fill(pool, variants, v, pool.price.token_s + next_s, share)
    share_models(pool, share, drafter, variants.models, passes)
    if pool.scores_placeholders:
        share_placeholders(pool, share, drafter, variants.models, passes)
    else:
        share_lookups(share, pool.offers, drafter, variants.models, passes)
    return True, next_s


@compiled
def _fill(pool: Pool, variants: Variants, v: int, token_s: float, share: Share) -> None:
    """Set `Share.columns` of a variant."""
    if variants.width[v] == 1:
        fill_chain(pool, variants.drafter[v], token_s, share.least_gain, share.columns[:, v])
    else:
        fill_tree(pool, variants.drafter[v], variants.width[v], token_s, share.least_gain, share.columns[:, v])


@compiled
def _drafts_s(pool: Pool, variants: Variants, passes: Ints, order: Ints) -> float:
    """Seconds of the drafts: all passes, and what each request adds to the passes of the variants that it uses. order:
    (2, N), see `Share.order`."""
    seconds, asking_s = 0.0, 0.0
    for v in range(len(passes)):
        if passes[v] > 0:
            d = variants.drafter[v]
            seconds += pool.first_s[d] + (passes[v] - 1) * pool.pass_s[d, variants.width[v] - 1]
    if pool.asking_s.size:
        for i in range(order.shape[1]):
            for v in order[:, i]:
                asking_s += passes[v] * pool.asking_s[variants.drafter[v], i] if v != NO_DRAFTER else 0.0
    return seconds + asking_s
