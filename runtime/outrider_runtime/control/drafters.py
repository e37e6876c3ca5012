"""Which drafters run, how many passes each, and who asks whom: one joint choice.

For each set of drafters that may run and each tier of passes: what each request gains with the drafter that suits it
best, less the fixed costs once. A lookup is one call however long, and a request that it finds nothing for is served by
a model that runs anyway: two entries in one ranking. k = 0 is always a candidate, and wins within the model's error.

Shapes: D drafters, N decoding requests, K positions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import NOBODY, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.value import Price, worth

MOST_FORCED = 4
"""AdaServe's n_max: positions of one request that goodput has no say in."""
EQUAL_SHORTFALL = 0.02
"""Tokens a request; choices that leave those behind their TPOT as short as this are told apart by their worth."""
EXACT_MODELS, REFINEMENTS = 2, 2
"""So many drafters with passes are given every combination of tiers; more are refined one by one, so many times."""


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """Where each request stands against its TPOT as the next step begins. All (N,)."""

    behind: Bools
    """It needs more than the bonus token and can still make it."""
    tokens: Floats
    """Beyond the bonus token, for a step that takes no time."""
    per_s: Floats
    """And for each second of it."""


class Pool(NamedTuple):
    """What the drafters offer for the next step."""

    paths: Floats
    """(D, N, K): probability that the target accepts a chain of 1..K; 0 past a request's room, and where the drafter
    cannot serve it."""
    offers: Floats
    """(D, N, K): probability that there is a proposal of that depth."""
    passes: Bools
    """(D,): every token is a pass."""
    first_s: Floats
    """(D,): seconds of the first pass, or of a lookup's call."""
    pass_s: Floats
    """(D,): seconds of each pass after the first; 0 for a lookup."""
    token_s: Floats
    """(D,): what each token that is verified costs in the drafter's next first pass; 0 for one that reads nothing."""
    price: Price
    tiers: Ints
    """Draft lengths to choose from, rising."""
    budget: int
    """Most proposals that the step may hold."""
    varlen: bool = True
    need: Need | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    passes: Ints
    """(D,): tokens that each drafter proposes; 0: it does not propose."""
    asked: Ints
    """(2, N)"""
    value: float
    """`E[tokens] - lambda * T_step`, bonus tokens left out."""
    plain_value: float
    """The same for k = 0."""
    for_slo: bool = False
    """Goodput alone might have chosen otherwise."""
    served: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """(D,): requests that ask each drafter."""

    @property
    def gain(self) -> float:
        """Expected tokens that speculation is worth in this step; 0 when k = 0 is the choice."""
        return self.value - self.plain_value


def nobody(drafters: int, requests: int, plain_value: float, *, for_slo: bool = False) -> Choice:
    """k = 0."""
    asked = np.full((2, requests), NOBODY)
    none = np.zeros(drafters, np.int64)
    return Choice(none, asked, plain_value, plain_value, for_slo, none)


def choose(pool: Pool, *, margin: float = 0.0) -> Choice:
    """The best set of drafters, passes and requests; k = 0 unless something is worth more than that by `margin` tokens.

    Exact where a verified token costs the same however many there are, for one or two drafters with passes. More are
    given the same passes first, and then each its own, one after the other.
    """
    drafters, requests, depths = pool.paths.shape
    plain = float(worth(0.0, pool.price.ragged_s[0], pool.price.rate))
    need = pool.need if pool.need is not None and pool.need.behind.any() else None
    choice = nobody(drafters, requests, plain, for_slo=need is not None)
    if pool.paths.size == 0 or len(pool.tiers) == 0 or not pool.paths[:, :, 0].any():
        return choice
    tables = _tables(pool, need)
    columns = _nothing_filled(tables)
    best = _best(tables, columns, *candidates(tuple(pool.passes.tolist()), tuple(pool.tiers.tolist()), depths))
    for _ in range(REFINEMENTS if np.count_nonzero(pool.passes) > EXACT_MODELS else 0):
        rows = _beside(best.passes, pool.passes, pool.tiers)
        best = _best(tables, columns, rows, np.zeros(len(rows), dtype=bool))
    if not best.passes.any() or (need is None and best.value - plain <= margin):
        return choice
    asked, lengths, served = _who_asks(tables, columns, best.passes, best.even)
    if not served.any():
        return choice
    return Choice(lengths, asked, best.value, plain, need is not None, served)


class _Tables(NamedTuple):
    """`Pool` as compiled code takes it, requests last: loops over them are what takes the time."""

    paths: Floats
    """(D, K, N)"""
    offers: Floats
    """(D, K, N): 0 where the path is."""
    passes: Bools
    first_s: Floats
    pass_s: Floats
    token_s: Floats
    node_s: Floats
    ragged_s: Floats
    uniform_s: Floats
    target_token_s: float
    """What a verified token costs the target at first: the price at which the best prefix is looked for. What the plan
    is worth under a cost that bends is weighed with its passes."""
    reads_s: Floats
    """(P,): what it may cost beyond that in the next first passes of the drafters that run."""
    rate: float
    most: int
    """Proposals that the step may hold."""
    varlen: bool
    behind: Bools
    need: Floats
    need_per_s: Floats


class _Columns(NamedTuple):
    """Of each price of a token: what requests' first 0..K positions are worth, those left out that do not pay for their
    token."""

    values: Floats
    """(P, 3, D, K+1, N): worth, expected tokens and expected proposals."""
    filled: Bools
    """(P,): prices that were asked for."""


class _Best(NamedTuple):
    passes: Ints
    value: float
    even: bool


@lru_cache(maxsize=64)
def candidates(passes: tuple[bool, ...], tiers: tuple[int, ...], depths: int) -> tuple[Ints, Bools]:
    """(C, D) and (C,): passes of each drafter, and whether all requests verify as many. The first is k = 0; then each
    set of drafters with each tier, or each combination of them: a lookup is asked for all there is."""
    choices = [(0, *tiers) if is_model else (0, depths) for is_model in passes]
    # One set after the other, the smallest first; of equal ones the fewest passes win.
    rows = sorted(itertools.product(*choices), key=lambda row: (np.count_nonzero(row), [k > 0 for k in row], sum(row)))
    if sum(passes) > EXACT_MODELS:
        rows = [row for row in rows if len(set(_of_models(row, passes))) < 2]
    alone = [row for row in rows if np.count_nonzero(row) == len(_of_models(row, passes)) == 1]
    evens = [False] * len(rows) + [True] * len(alone)
    return np.array(rows + alone, np.int64), np.array(evens)


def _of_models(row: tuple[int, ...], passes: tuple[bool, ...]) -> list[int]:
    """The passes of those that run, lookups left out."""
    return [tier for tier, is_model in zip(row, passes, strict=True) if is_model and tier]


@compiled
def _beside(best: Ints, passes: Bools, tiers: Ints) -> Ints:
    """(C, D): the candidates that differ from `best` in the passes of one drafter, whether it runs or not."""
    rows, count = np.empty((1 + len(best) * (1 + len(tiers)), len(best)), np.int64), 1
    rows[:] = best
    for drafter in np.flatnonzero(passes):
        for t in range(-1, len(tiers)):
            rows[count, drafter] = tiers[t] if t >= 0 else 0
            count += 1
    return rows[:count]


def _tables(pool: Pool, need: Need | None) -> _Tables:
    price, nothing = pool.price, np.zeros(pool.paths.shape[1])
    uniform_s = price.uniform_s if pool.varlen or math.isfinite(price.uniform_s[-1]) else price.ragged_s
    paths, offers = _by_depth(pool.paths, pool.offers)
    need = Need(nothing > 0, nothing, nothing) if need is None else need
    return _Tables(
        paths, offers, pool.passes, pool.first_s, pool.pass_s, pool.token_s, price.node_s, price.ragged_s, uniform_s,
        price.token_s, _reads_s(pool.token_s), price.rate, min(pool.budget, len(price.ragged_s) - 1), pool.varlen,
        need.behind, need.tokens, need.per_s,
    )  # fmt: skip


@compiled
def _reads_s(token_s: Floats) -> Floats:
    """Every sum of one or two readers' seconds a token, a few of more."""
    readers = token_s[token_s > 0]
    if len(readers) > EXACT_MODELS:
        return np.linspace(0.0, readers.sum(), 2 + EXACT_MODELS)
    sums = np.zeros(2 ** len(readers))
    for number in range(len(sums)):
        for reader in range(len(readers)):
            sums[number] += readers[reader] * (number >> reader & 1)
    return sums


def _nothing_filled(t: _Tables) -> _Columns:
    drafters, depths, requests = t.paths.shape
    prices = len(t.reads_s)
    return _Columns(np.empty((prices, 3, drafters, depths + 1, requests)), np.zeros(prices, dtype=bool))


def _best(tables: _Tables, columns: _Columns, rows: Ints, evens: Bools) -> _Best:
    values, short = _evaluate(tables, columns, rows, evens)
    if tables.behind.any():
        values = np.where(short <= short.min() + EQUAL_SHORTFALL * tables.behind.sum(), values, -np.inf)
    number = int(values.argmax())  # the first of equal ones
    return _Best(rows[number], float(values[number]), bool(evens[number]))


@compiled
def _by_depth(paths: Floats, offers: Floats) -> tuple[Floats, Floats]:
    drafters, requests, depths = paths.shape
    turned, there = np.empty((drafters, depths, requests)), np.empty((drafters, depths, requests))
    for d in range(drafters):
        for i in range(requests):
            for k in range(depths):
                turned[d, k, i] = paths[d, i, k]
                there[d, k, i] = offers[d, i, k] if paths[d, i, k] > 0.0 else 0.0
    return turned, there


@compiled
def _evaluate(t: _Tables, columns: _Columns, rows: Ints, evens: Bools) -> tuple[Floats, Floats]:
    """Two (C,): worth of each candidate, and the tokens that those behind would lack."""
    values, short = np.empty(len(rows)), np.empty(len(rows))
    who, share = np.empty((2, len(t.node_s)), np.int64), np.empty((3, len(t.node_s)))
    for c in range(len(rows)):
        _share(t, columns, rows[c], evens[c], who, share)
        values[c], short[c] = _worth_of(t, rows[c], evens[c], share)
    return values, short


@compiled
def _share(t: _Tables, columns: _Columns, passes: Ints, even: bool, who: Ints, share: Floats) -> None:
    """who: (2, N), whom each request asks first and, where that finds nothing, next. share: (3, N), the tokens and
    proposals that it may expect, and how likely it has no proposal."""
    if even:
        _share_evenly(t, passes, who, share)
    else:
        _share_out(t, _at(t, columns, passes), passes, who, share)


@compiled
def _at(t: _Tables, columns: _Columns, passes: Ints) -> Floats:
    """(3, D, K+1, N), at the price that a token has where these drafters run."""
    reads_s = (t.token_s * (passes > 0)).sum()
    nearest = np.abs(t.reads_s - reads_s).argmin()
    found = columns.values[nearest]
    if not columns.filled[nearest]:
        columns.filled[nearest] = True
        for d in range(len(passes)):
            _fill(t, d, t.target_token_s + t.reads_s[nearest], found[0, d], found[1, d], found[2, d])
    return np.asarray(found)


@compiled
def _fill(t: _Tables, d: int, token_s: float, net: Floats, gain: Floats, tokens: Floats) -> None:
    net[0], gain[0], tokens[0] = 0.0, 0.0, 0.0
    pays = np.ones(t.paths.shape[2], np.bool_)
    for k in range(t.paths.shape[1]):
        for i in range(t.paths.shape[2]):
            path, price = t.paths[d, k, i], t.rate * (token_s + t.node_s[i])
            lacks = t.behind[i] and k < MOST_FORCED and gain[k, i] < t.need[i] + t.need_per_s[i] * t.ragged_s[0]
            pays[i] &= path > (price if t.varlen and not lacks else 0.0)  # what it lacks, at any cost
            there = t.offers[d, k, i] if pays[i] else 0.0
            gain[k + 1, i] = gain[k, i] + there * path
            tokens[k + 1, i] = tokens[k, i] + there
            net[k + 1, i] = gain[k + 1, i] - (0.0 if t.behind[i] else price * tokens[k + 1, i])


@compiled
def _share_out(t: _Tables, columns: Floats, passes: Ints, who: Ints, share: Floats) -> None:
    """See `_share`, where each request verifies what pays. columns: of the price."""
    depths, requests = t.paths.shape[1:]
    who[:], share[:2], share[2] = NOBODY, 0.0, 1.0
    best = np.zeros(requests)
    for d in range(len(passes)):
        if t.passes[d] and passes[d] > 0:
            net, gain, tokens = columns[0, d, passes[d]], columns[1, d, passes[d]], columns[2, d, passes[d]]
            for i in range(requests):
                if net[i] > best[i]:
                    best[i], who[0, i], share[0, i], share[1, i], share[2, i] = net[i], d, gain[i], tokens[i], 0.0
    if t.passes.all():
        return
    model, of_model, of_both = who[0].copy(), share.copy(), best.copy()
    for d in range(len(passes)):
        if not t.passes[d] and passes[d] > 0:
            net, gain, tokens = columns[0, d, depths], columns[1, d, depths], columns[2, d, depths]
            for i in range(requests):
                miss = max(0.0, 1.0 - t.offers[d, 0, i])
                here = net[i] + miss * best[i]
                ties = here == of_both[i] and who[0, i] == model[i] and d < model[i]
                if tokens[i] > 0.0 and (here > of_both[i] or ties):
                    of_both[i], who[0, i], who[1, i] = here, d, model[i]
                    share[0, i] = gain[i] + miss * of_model[0, i]
                    share[1, i] = tokens[i] + miss * of_model[1, i]
                    share[2, i] = miss * of_model[2, i]


@compiled
def _share_evenly(t: _Tables, passes: Ints, who: Ints, share: Floats) -> None:
    """The same where every request verifies all that one drafter proposes."""
    d = int(passes.argmax())
    who[0], who[1], share[:] = d, NOBODY, 0.0
    for k in range(passes[d]):
        for i in range(t.paths.shape[2]):
            share[0, i] += t.offers[d, k, i] * t.paths[d, k, i]
            share[1, i] += t.offers[d, k, i]


@compiled
def _worth_of(t: _Tables, passes: Ints, even: bool, share: Floats) -> tuple[float, float]:
    """Worth of one candidate, -inf where it does not fit, and the tokens that those behind would lack."""
    requests = len(t.node_s)
    gain, tokens, none, nodes_s, drafts_s, next_s = 0.0, 0.0, 1.0, 0.0, 0.0, 0.0
    for d in range(len(passes)):
        if passes[d] > 0:
            drafts_s += t.first_s[d] + (passes[d] - 1) * t.pass_s[d]
            next_s += t.token_s[d]  # of a verified token, in their next first passes
    for i in range(requests):
        if even and share[1, i] < passes.max():
            return -np.inf, np.inf  # somebody cannot verify as many
        gain += share[0, i]
        tokens += share[1, i]
        none *= share[2, i]
        nodes_s += share[1, i] * (t.node_s[i] + next_s)
    held = tokens if t.varlen else float(requests * passes.max())  # padded
    if held > t.most:
        return -np.inf, np.inf
    target_s = t.uniform_s[int(held)] if even or not t.varlen else _expected_s(t.ragged_s, tokens, none)
    short = 0.0
    for i in range(requests):
        if t.behind[i]:
            short += max(0.0, t.need[i] + t.need_per_s[i] * (target_s + drafts_s) - share[0, i])
    return worth(gain, target_s + nodes_s + drafts_s, t.rate), short


@compiled
def _expected_s(seconds: Floats, tokens: float, none: float) -> float:
    """Of a step that is plain with probability `none` and holds `tokens` on average."""
    if none >= 1.0 or tokens <= 0.0:
        return float(seconds[0])
    if_any = max(1.0, tokens / (1.0 - none))
    whole = min(int(if_any), len(seconds) - 1)
    after = min(whole + 1, len(seconds) - 1)
    verifies = seconds[whole] + (if_any - whole) * (seconds[after] - seconds[whole])
    return float(none * seconds[0] + (1.0 - none) * verifies)


@compiled
def _who_asks(t: _Tables, columns: _Columns, passes: Ints, even: bool) -> tuple[Ints, Ints, Ints]:
    """(2, N) whom each request asks, (D,) the longest proposal that is asked of each drafter, (D,) by how many."""
    drafters, _, requests = t.paths.shape
    who, share = np.empty((2, requests), np.int64), np.empty((3, requests))
    _share(t, columns, passes, even, who, share)
    lengths, served = np.zeros(drafters, np.int64), np.zeros(drafters, np.int64)
    for i in range(requests):
        for d in who[:, i]:
            if d != NOBODY:
                served[d] += 1
                lengths[d] = max(
                    lengths[d], passes[d] if t.passes[d] else _longest(_at(t, columns, passes)[2, d, :, i])
                )
    return who, lengths, served


@compiled
def _longest(tokens: Floats) -> int:
    """Positions that are asked for, of a request's expected proposals (K+1,)."""
    length = 0
    for k in range(1, len(tokens)):
        if tokens[k] > tokens[k - 1]:
            length = k
    return length
