"""Which drafters run, how many passes each, and who asks whom: one joint choice.

For each set of drafters that may run and each tier of passes: what each request gains with the drafter that suits it
best, less the fixed costs once. A lookup is one call however long, and a request that it finds nothing for is served by
a model that runs anyway: two entries in one ranking. k = 0 is always a candidate, and wins within the model's error.

Shapes: D drafters, N decoding requests, K positions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from outrider_runtime.core.batch import NOBODY, Bools, Floats, Ints
from outrider_runtime.core.compiled import compiled
from outrider_runtime.core.value import Price, worth

LEVELS = (0.0, 0.4, 1.0)
"""Between the lowest and the highest price of a token: where the best prefix is looked for under a cost that bends."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
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
    plain = float(worth(0.0, pool.price.plain_s, pool.price.rate))
    need = pool.need if pool.need is not None and pool.need.behind.any() else None
    nothing = nobody(drafters, requests, plain, for_slo=need is not None)
    if pool.paths.size == 0 or len(pool.tiers) == 0 or not pool.paths[:, :, 0].any():
        return nothing
    tables, levels = _tables(pool, need), _levels(pool.price)
    best = _best(tables, candidates(tuple(pool.passes.tolist()), tuple(pool.tiers.tolist()), depths), levels)
    for _ in range(REFINEMENTS if pool.passes.sum() > EXACT_MODELS else 0):
        best = _best(tables, _beside(best.passes, pool.passes, pool.tiers), levels)
    if not best.passes.any() or (need is None and best.value - plain <= margin):
        return nothing
    asked, lengths, served = _who_asks(tables, best.passes, levels[best.level], best.even)
    if not served.any():
        return nothing
    return Choice(lengths, asked, best.value, plain, need is not None, served)


class _Tables(NamedTuple):
    """`Pool` as compiled code takes it."""

    gains: Floats
    """(D, N, K+1): expected tokens of the first 0..K positions."""
    tokens: Floats
    """(D, N, K+1): expected proposals among them."""
    paths: Floats
    passes: Bools
    first_s: Floats
    pass_s: Floats
    token_s: Floats
    node_s: Floats
    ragged_s: Floats
    uniform_s: Floats
    rate: float
    budget: int
    varlen: bool
    behind: Bools
    need: Floats
    need_per_s: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Best:
    passes: Ints
    value: float
    level: int
    even: bool


@lru_cache(maxsize=64)
def candidates(passes: tuple[bool, ...], tiers: tuple[int, ...], depths: int) -> tuple[Ints, Bools]:
    """(C, D) and (C,): passes of each drafter, and whether all requests verify as many. The first is k = 0; then each
    set of drafters with each tier, or each combination of them. A lookup is asked for all there is."""
    choices = [(0, *tiers) if is_model else (0, depths) for is_model in passes]
    rows = sorted(itertools.product(*choices), key=sum)  # of equal ones the fewest passes win
    if sum(passes) > EXACT_MODELS:
        rows = [row for row in rows if len(set(_of_models(row, passes))) < 2]
    alone = [row for row in rows if sum(tier > 0 for tier in row) == len(_of_models(row, passes)) == 1]
    evens = [False] * len(rows) + [True] * len(alone)
    return np.array(rows + alone, np.int64), np.array(evens)


def _of_models(row: tuple[int, ...], passes: tuple[bool, ...]) -> list[int]:
    """The passes of those that run, lookups left out."""
    return [tier for tier, is_model in zip(row, passes, strict=True) if is_model and tier]


def _beside(best: Ints, passes: Bools, tiers: Ints) -> tuple[Ints, Bools]:
    """The candidates that differ from `best` in the passes of one drafter, whether it runs or not."""
    rows = [best]
    for drafter in np.flatnonzero(passes):
        for tier in (0, *tiers.tolist()):
            row = best.copy()
            row[drafter] = tier
            rows.append(row)
    return np.array(rows), np.zeros(len(rows), dtype=bool)


def _tables(pool: Pool, need: Need | None) -> _Tables:
    gains, tokens = _sums(pool.paths, pool.offers)
    price, nothing = pool.price, np.zeros(pool.paths.shape[1])
    uniform_s = price.uniform_s if pool.varlen or np.isfinite(price.uniform_s[-1]) else price.ragged_s
    return _Tables(
        gains, tokens, pool.paths, pool.passes, pool.first_s, pool.pass_s, pool.token_s, price.node_s, price.ragged_s,
        uniform_s, price.rate, pool.budget, pool.varlen,
        nothing > 0 if need is None else need.behind,
        nothing if need is None else need.tokens, nothing if need is None else need.per_s,
    )  # fmt: skip


def _levels(price: Price) -> Floats:
    """Prices of a verified token, in seconds, at which prefixes are looked at."""
    if price.dear_s == price.token_s:
        return np.array([price.token_s])
    return np.array([price.token_s + share * (price.dear_s - price.token_s) for share in LEVELS])


def _best(tables: _Tables, rows: tuple[Ints, Bools], levels: Floats) -> _Best:
    values, short = _evaluate(tables, *rows, levels)
    if tables.behind.any():
        values = np.where(short <= short.min() + EQUAL_SHORTFALL * tables.behind.sum(), values, -np.inf)
    level, number = divmod(int(values.argmax()), len(rows[0]))  # the first of equal ones
    return _Best(rows[0][number], float(values[level, number]), level, bool(rows[1][number]))


@compiled
def _sums(paths: Floats, offers: Floats) -> tuple[Floats, Floats]:
    drafters, requests, depths = paths.shape
    gains, tokens = np.zeros((drafters, requests, depths + 1)), np.zeros((drafters, requests, depths + 1))
    for d in range(drafters):
        for i in range(requests):
            for k in range(depths):
                there = offers[d, i, k] if paths[d, i, k] > 0.0 else 0.0
                gains[d, i, k + 1] = gains[d, i, k] + there * paths[d, i, k]
                tokens[d, i, k + 1] = tokens[d, i, k] + there
    return gains, tokens


@compiled
def _evaluate(t: _Tables, rows: Ints, evens: Bools, levels: Floats) -> tuple[Floats, Floats]:
    """Two (Q, C): worth of each candidate at each price of a token, and the tokens that those behind would lack."""
    values, short = np.empty((len(levels), len(rows))), np.zeros((len(levels), len(rows)))
    prices, paying = np.empty(len(t.node_s)), np.zeros(t.gains.shape[:2], np.int64)
    for q in range(len(levels)):
        last_s = -1.0
        for c in range(len(rows)):
            next_s = _next_pass_s(t, rows[c])
            if next_s != last_s:
                _count_paying(t, levels[q] + next_s, prices, paying)
                last_s = next_s
            values[q, c], short[q, c] = _worth_of(t, rows[c], evens[c], prices, paying, next_s)
    return values, short


@compiled
def _next_pass_s(t: _Tables, passes: Ints) -> float:
    """What a verified token costs in the next first passes of the drafters that run."""
    seconds = 0.0
    for d in range(len(passes)):
        seconds += t.token_s[d] * (passes[d] > 0)
    return seconds


@compiled
def _count_paying(t: _Tables, token_s: float, prices: Floats, paying: Ints) -> None:
    """The price of a token for each request, and how many positions of each drafter are worth it."""
    drafters, requests, depths = t.paths.shape
    for i in range(requests):
        prices[i] = t.rate * (token_s + t.node_s[i])
        for d in range(drafters):
            count = 0
            while count < depths and t.paths[d, i, count] > (prices[i] if t.varlen else 0.0):
                count += 1
            if t.behind[i]:  # at any cost, until it has what it needs
                need = t.need[i] + t.need_per_s[i] * t.ragged_s[0]
                most = min(MOST_FORCED, depths)
                while count < most and t.gains[d, i, count] < need and t.paths[d, i, count] > 0.0:
                    count += 1
            paying[d, i] = count


@compiled
def _pick(
    t: _Tables, i: int, passes: Ints, even: bool, price: float, paying: Ints
) -> tuple[int, int, float, float, float]:  # fmt: skip
    """Whom request i asks first and, where that finds nothing, next; its gain, its proposals, and how likely it has
    none."""
    model, model_worth, model_gain, model_tokens = NOBODY, 0.0, 0.0, 0.0
    for d in range(len(passes)):
        if t.passes[d] and passes[d] > 0:
            count = passes[d] if even else min(passes[d], paying[d, i])
            gain, tokens = t.gains[d, i, count], t.tokens[d, i, count]
            here = gain if t.behind[i] else gain - price * tokens
            if tokens > 0.0 and (here > model_worth or (even and model == NOBODY)):
                model, model_worth, model_gain, model_tokens = d, here, gain, tokens
    first, second, best = model, NOBODY, model_worth
    gain, tokens, none = model_gain, model_tokens, 1.0 if model == NOBODY else 0.0
    for d in range(len(passes)):
        if not t.passes[d] and passes[d] > 0 and paying[d, i] > 0:
            own_gain, own_tokens = t.gains[d, i, paying[d, i]], t.tokens[d, i, paying[d, i]]
            miss = max(0.0, 1.0 - t.tokens[d, i, 1])
            own = own_gain if t.behind[i] else own_gain - price * own_tokens
            here = own + miss * model_worth
            if here > best or (here == best and first == model and d < model):
                first, second, best = d, model, here
                gain, tokens = own_gain + miss * model_gain, own_tokens + miss * model_tokens
                none = miss if model == NOBODY else 0.0
    return first, second, gain, tokens, none


@compiled
def _worth_of(t: _Tables, passes: Ints, even: bool, prices: Floats, paying: Ints, next_s: float) -> tuple[float, float]:
    """Worth of one candidate, and the tokens that those behind would lack; -inf where it does not fit."""
    requests = len(t.node_s)
    gain, tokens, none, nodes_s, drafts_s = 0.0, 0.0, 1.0, 0.0, 0.0
    gained = np.zeros(requests)
    for i in range(requests):
        first, _, more, own, nothing = _pick(t, i, passes, even, prices[i], paying)
        if even and (first == NOBODY or own < passes.max()):
            return -np.inf, np.inf  # somebody cannot verify as many
        gained[i] = more
        gain += more
        tokens += own
        none *= nothing
        nodes_s += own * (t.node_s[i] + next_s)
    for d in range(len(passes)):
        if passes[d] > 0:
            drafts_s += t.first_s[d] + (passes[d] - 1) * t.pass_s[d]
    if not t.varlen:
        tokens = float(requests * passes.max())  # padded
    if tokens > min(t.budget, len(t.ragged_s) - 1):
        return -np.inf, np.inf
    target_s = t.uniform_s[int(tokens)] if even or not t.varlen else _expected_s(t.ragged_s, tokens, none)
    short = 0.0
    for i in range(requests):
        if t.behind[i]:
            short += max(0.0, t.need[i] + t.need_per_s[i] * (target_s + drafts_s) - gained[i])
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
def _who_asks(t: _Tables, passes: Ints, level_s: float, even: bool) -> tuple[Ints, Ints, Ints]:
    """(2, N) whom each request asks, (D,) the longest proposal that is asked of each drafter, (D,) by how many."""
    drafters, requests = t.gains.shape[:2]
    prices, paying = np.empty(requests), np.zeros((drafters, requests), np.int64)
    _count_paying(t, level_s + _next_pass_s(t, passes), prices, paying)
    asked, lengths = np.full((2, requests), NOBODY), np.zeros(drafters, np.int64)
    served = np.zeros(drafters, np.int64)
    for i in range(requests):
        first, second, _, _, _ = _pick(t, i, passes, even, prices[i], paying)
        asked[0, i], asked[1, i] = first, second
        for d in (first, second):
            if d != NOBODY:
                served[d] += 1
                lengths[d] = max(lengths[d], passes[d] if t.passes[d] else paying[d, i])
    return asked, lengths, served
