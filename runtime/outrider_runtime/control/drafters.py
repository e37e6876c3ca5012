"""Which drafters run, how many passes each, and who asks whom: one joint choice.

For each set of drafters that may run and each number of passes: what each request gains with the drafter that suits it
best, less the fixed costs once. A lookup is one call however long, and a request that it finds nothing for is served by
a model that runs anyway: two entries in one ranking. k = 0 is always a candidate, and wins a tie.

Shapes: D drafters, N decoding requests, K positions.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import NOBODY, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.value import WHOLE_BATCH, Price, worth

MOST_FORCED = 4
"""AdaServe's n_max: positions of one request that goodput has no say in."""
EQUAL_SHORTFALL = 0.02
"""Tokens a request; choices that leave those behind their TPOT as short as this are told apart by their worth."""
EXACT_MODELS, REFINEMENTS = 2, 2
"""So many drafters with passes are given every combination of lengths; more are refined one by one, so many times."""


class Need(NamedTuple):
    """Where each request stands against its TPOT as the next step begins. All (N,)."""

    behind: Bools
    """It needs more than the bonus token and can still make it."""
    tokens: Floats
    """Beyond the bonus token, for a step that takes no time."""
    per_s: Floats
    """And for each second of it."""


@compiled
def nobody_behind(requests: int) -> Need:
    nothing = np.zeros(requests)
    return Need(np.zeros(requests, np.bool_), nothing, nothing)


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
    longest: int
    """Draft length."""
    budget: int
    """Most proposals that the step may hold."""
    need: Need
    asking_s: Floats = WHOLE_BATCH
    """(D, N): seconds by which a request lengthens each pass that it asks for; (0, 0) where every drafter that runs
    runs over the whole batch."""


class Choice(NamedTuple):
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
    runs: bool = False
    """Somebody proposes."""
    holes: bool = False
    """Some draft model cannot be asked by some request, as its cache has a hole."""
    drafts_s: float = 0.0
    """Seconds of the drafts."""

    @property
    def gain(self) -> float:
        """Expected tokens that speculation is worth in this step; 0 when k = 0 is the choice."""
        return self.value - self.plain_value


def nobody(drafters: int, requests: int) -> Choice:
    """k = 0."""
    return Choice(np.zeros(drafters, np.int64), np.full((2, requests), NOBODY), 0.0, 0.0)


def choose(pool: Pool) -> Choice:
    """The best set of drafters, passes and requests; k = 0 unless something is worth more than that.

    Exact where a verified token costs the same however many there are, for one or two drafters with passes. More are
    given the same passes first, and then each its own, one after the other.
    """
    passes = np.zeros(len(pool.passes), np.int64)
    asked = np.full((2, pool.paths.shape[1]), NOBODY)
    found = best_choice(pool, candidates(pool.passes, pool.longest, pool.paths.shape[2]), passes, asked)
    return Choice(passes, asked, *found)


@compiled
def best_choice(
    pool: Pool, rows: tuple[Ints, Bools], passes: Ints, asked: Ints
) -> tuple[float, float, bool, bool]:  # fmt: skip
    """The other fields of `Choice`; `passes` and `asked`, zeros and NOBODY, are set to it. rows: see `candidates`."""
    price, for_slo = pool.price, bool(pool.need.behind.any())
    plain = float(-price.rate * price.ragged_s[0])
    if pool.paths.size == 0 or not pool.longest:
        return plain, plain, for_slo, False
    value, lengths, who, runs = _choose(pool, rows[0], rows[1])
    if not runs or (not for_slo and value <= plain):
        return plain, plain, for_slo, False
    passes[:], asked[:] = lengths, who
    return value, plain, for_slo, True


@compiled
def drafts_s(pool: Pool, passes: Ints, asked: Ints) -> float:
    """Seconds of the drafts that were chosen."""
    seconds, _ = _draft_seconds(passes, pool.first_s, pool.pass_s, pool.token_s)
    return seconds + _asking_seconds(passes, asked, pool.asking_s)


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
    rate: float
    most: int
    """Proposals that the step may hold."""
    behind: Bools
    need: Floats
    need_per_s: Floats
    asking_s: Floats
    """(D, N), or (0, 0)"""


class _Best(NamedTuple):
    passes: Ints
    value: float
    even: bool


def candidates(passes: Bools, longest: int, depths: int) -> tuple[Ints, Bools]:
    """(C, D) and (C,): passes of each drafter, and whether all requests verify as many. The first is k = 0; then each
    set of drafters with each length, or each combination of them: a lookup is asked for all there is."""
    return _candidates(tuple(passes.tolist()), longest, depths)


@lru_cache(maxsize=64)
def _candidates(passes: tuple[bool, ...], longest: int, depths: int) -> tuple[Ints, Bools]:
    choices = [range(longest + 1) if is_model else (0, depths) for is_model in passes]
    # One set after the other, the smallest first; of equal ones the fewest passes win.
    rows = sorted(itertools.product(*choices), key=lambda row: (np.count_nonzero(row), [k > 0 for k in row], sum(row)))
    if sum(passes) > EXACT_MODELS:
        rows = [row for row in rows if len(set(_of_models(row, passes))) < 2]
    alone = [row for row in rows if np.count_nonzero(row) == len(_of_models(row, passes)) == 1]
    evens = [False] * len(rows) + [True] * len(alone)
    return np.array(rows + alone, np.int64), np.array(evens)


def _of_models(row: tuple[int, ...], passes: tuple[bool, ...]) -> list[int]:
    """The passes of those that run, lookups left out."""
    return [length for length, is_model in zip(row, passes, strict=True) if is_model and length]


@compiled
def _choose(pool: Pool, rows: Ints, evens: Bools) -> tuple[float, Ints, Ints, bool]:
    """Worth of the best choice, (D,) the longest proposal that is asked of each drafter, (2, N) whom each request asks,
    and whether any does."""
    price, need = pool.price, pool.need
    paths, offers = _by_depth(pool.paths, pool.offers)
    t = _Tables(
        paths, offers, pool.passes, pool.first_s, pool.pass_s, pool.token_s, price.node_s, price.ragged_s,
        price.uniform_s, price.token_s, price.rate, min(pool.budget, len(price.ragged_s) - 1), need.behind,
        need.tokens, need.per_s, pool.asking_s,
    )  # fmt: skip
    drafters, requests, depths = pool.paths.shape
    columns, read_s = np.zeros((3, drafters, depths + 1, requests)), np.full(drafters, np.nan)
    who, share = np.empty((2, requests), np.int64), np.empty((4, requests))
    best = _best(t, columns, read_s, rows, evens, who, share)
    for _ in range(REFINEMENTS if pool.passes.sum() > EXACT_MODELS else 0):
        beside = _beside(best.passes, pool.passes, pool.longest)
        best = _best(t, columns, read_s, beside, np.zeros(len(beside), np.bool_), who, share)
    _best(t, columns, read_s, best.passes.reshape(1, -1), np.full(1, best.even), who, share)
    lengths = _longest(columns[2], pool.passes, best.passes, who)
    return best.value, lengths, who, lengths.max() > 0


@compiled
def _best(
    t: _Tables, columns: Floats, read_s: Floats, rows: Ints, evens: Bools, who: Ints, share: Floats
) -> _Best:  # fmt: skip
    """The candidate of the highest worth, of those that leave the ones behind about as short as it can be.

    rows: (C, D), the candidates' passes; evens: (C,). who, share: of the last one, see `_share_models`. columns: (3, D,
    K+1, N), see `_fill`; read_s: (D,), what they are filled for.
    """
    values, short, late = np.full(len(rows), -np.inf), np.full(len(rows), np.inf), t.behind.any()
    for c in range(len(rows)):
        passes = rows[c]
        drafts_s, next_s = _draft_seconds(passes, t.first_s, t.pass_s, t.token_s)
        if evens[c]:
            if not _share_evenly(t.paths, t.offers, passes, who, share):
                continue
        else:
            for d in range(len(passes)):
                if passes[d] > 0 and read_s[d] != next_s:
                    read_s[d] = next_s
                    _fill(t, d, t.target_token_s + next_s, columns[:, d])
            _share_models(columns, t.passes, passes, who, share)
            _share_lookups(columns, t.offers, t.passes, passes, who, share)
        tokens, none, nodes_s = _proposals(share, t.node_s, next_s)
        if tokens <= t.most:
            target_s = t.uniform_s[int(tokens)] if evens[c] else expected_s(t.ragged_s, tokens, none)
            step_s = drafts_s + _asking_seconds(passes, who, t.asking_s) + target_s
            values[c] = worth(share[0].sum(), step_s + nodes_s, t.rate)
            short[c] = shortfall(share[0], t.behind, t.need, t.need_per_s, step_s) if late else 0.0
    values[short > short.min() + EQUAL_SHORTFALL * t.behind.sum()] = -np.inf
    best = values.argmax()  # the first of equal ones
    return _Best(rows[best], values[best], evens[best])


@compiled
def _beside(best: Ints, passes: Bools, longest: int) -> Ints:
    """(C, D): the candidates that differ from `best` in the passes of one drafter, whether it runs or not."""
    rows, count = np.empty((1 + len(best) * (1 + longest), len(best)), np.int64), 1
    rows[:] = best
    for drafter in np.flatnonzero(passes):
        for length in range(longest + 1):
            rows[count, drafter] = length
            count += 1
    return rows[:count]


@compiled
def _draft_seconds(passes: Ints, first_s: Floats, pass_s: Floats, token_s: Floats) -> tuple[float, float]:
    """Of the drafts, and of a verified token in the next first passes of those that run. All (D,)."""
    drafts_s, next_s = 0.0, 0.0
    for d in range(len(passes)):
        if passes[d] > 0:
            drafts_s += first_s[d] + (passes[d] - 1) * pass_s[d]
            next_s += token_s[d]
    return drafts_s, next_s


@compiled
def _asking_seconds(passes: Ints, who: Ints, asking_s: Floats) -> float:
    """What the requests that ask add to the drafts: each to every pass of whom it asks. who: (2, N)"""
    seconds = 0.0
    if asking_s.size:
        for i in range(who.shape[1]):
            for d in who[:, i]:
                seconds += passes[d] * asking_s[d, i] if d != NOBODY else 0.0
    return seconds


@compiled
def _fill(t: _Tables, d: int, token_s: float, columns: Floats) -> None:
    """columns: (3, K+1, N), of a drafter: what requests' first 0..K positions are worth at the price of a token, those
    left out that do not pay for it; how many tokens and how many proposals are expected of them."""
    net, gain, tokens, paths, offers = columns[0], columns[1], columns[2], t.paths[d], t.offers[d]
    pays = np.ones(paths.shape[1], np.bool_)
    for k in range(paths.shape[0]):
        for i in range(paths.shape[1]):
            price = t.rate * (token_s + t.node_s[i])
            lacks = t.behind[i] and k < MOST_FORCED and gain[k, i] < t.need[i] + t.need_per_s[i] * t.ragged_s[0]
            pays[i] &= paths[k, i] > (0.0 if lacks else price)  # what it lacks, at any cost
            there = offers[k, i] if pays[i] else 0.0
            gain[k + 1, i] = gain[k, i] + there * paths[k, i]
            tokens[k + 1, i] = tokens[k, i] + there
            net[k + 1, i] = gain[k + 1, i] - (0.0 if t.behind[i] else price * tokens[k + 1, i])
            if t.asking_s.size and not t.behind[i]:
                net[k + 1, i] -= t.rate * (k + 1) * t.asking_s[d, i]


@compiled
def _share_models(columns: Floats, models: Bools, passes: Ints, who: Ints, share: Floats) -> None:
    """Each request asks the model that is worth most to it.

    who: (2, N), whom each asks first and, where that finds nothing, next. share: (4, N), the tokens and the proposals
    that it may expect, how likely it has no proposal, and what all is worth. columns: (3, D, K+1, N)
    """
    who[:], share[:2], share[2], share[3] = NOBODY, 0.0, 1.0, 0.0
    for d in range(len(passes)):
        if models[d] and passes[d] > 0:
            net, gain, tokens = columns[0, d, passes[d]], columns[1, d, passes[d]], columns[2, d, passes[d]]
            for i in range(len(net)):
                if net[i] > share[3, i]:
                    who[0, i], share[0, i], share[1, i], share[2, i], share[3, i] = d, gain[i], tokens[i], 0.0, net[i]


@compiled
def _share_lookups(columns: Floats, offers: Floats, models: Bools, passes: Ints, who: Ints, share: Floats) -> None:
    """Before its model a request asks the lookup that is worth most beside it. offers: (D, K, N)"""
    if models.all():
        return
    model, of_model = who[0].copy(), share.copy()
    for d in range(len(passes)):
        if not models[d] and passes[d] > 0:
            net, gain, tokens = columns[0, d, passes[d]], columns[1, d, passes[d]], columns[2, d, passes[d]]
            for i in range(len(net)):
                miss = max(0.0, 1.0 - offers[d, 0, i])
                here = net[i] + miss * of_model[3, i]
                ties = here == share[3, i] and who[0, i] == model[i] and d < model[i]
                if tokens[i] > 0.0 and (here > share[3, i] or ties):
                    who[0, i], who[1, i], share[3, i] = d, model[i], here
                    share[0, i] = gain[i] + miss * of_model[0, i]
                    share[1, i] = tokens[i] + miss * of_model[1, i]
                    share[2, i] = miss * of_model[2, i]


@compiled
def _share_evenly(paths: Floats, offers: Floats, passes: Ints, who: Ints, share: Floats) -> bool:
    """Every request verifies all that the one drafter proposes that runs. False where one cannot."""
    d = int(passes.argmax())
    who[0], who[1], share[:] = d, NOBODY, 0.0
    for k in range(passes[d]):
        for i in range(paths.shape[2]):
            share[0, i] += offers[d, k, i] * paths[d, k, i]
            share[1, i] += offers[d, k, i]
    return bool(share[1].min() >= passes[d])


@compiled
def _proposals(share: Floats, node_s: Floats, next_s: float) -> tuple[float, float, float]:
    """How many are expected, how likely there is none, and what they cost beyond their number."""
    tokens, none, nodes_s = 0.0, 1.0, 0.0
    for i in range(share.shape[1]):
        tokens += share[1, i]
        none *= share[2, i]
        nodes_s += share[1, i] * (node_s[i] + next_s)
    return tokens, none, nodes_s


@compiled
def shortfall(gains: Floats, behind: Bools, need: Floats, need_per_s: Floats, step_s: float) -> float:
    """Tokens that those behind lack after a step that gives `gains`. All (N,)."""
    short = 0.0
    for i in range(len(gains)):
        if behind[i]:
            short += max(0.0, need[i] + need_per_s[i] * step_s - gains[i])
    return short


@compiled
def expected_s(seconds: Floats, tokens: float, none: float) -> float:
    """Of a step that is plain with probability `none` and holds `tokens` on average."""
    if none >= 1.0 or tokens <= 0.0:
        return float(seconds[0])
    if_any = max(1.0, tokens / (1.0 - none))
    whole = min(int(if_any), len(seconds) - 1)
    after = min(whole + 1, len(seconds) - 1)
    verifies = seconds[whole] + (if_any - whole) * (seconds[after] - seconds[whole])
    return float(none * seconds[0] + (1.0 - none) * verifies)


@compiled
def _longest(proposals: Floats, models: Bools, passes: Ints, who: Ints) -> Ints:
    """(D,): the longest proposal that anybody asks each drafter for; of a lookup, the positions that pay for
    themselves. proposals: (D, K+1, N), expected ones."""
    lengths = np.zeros(len(passes), np.int64)
    for i in range(who.shape[1]):
        for d in who[:, i]:
            if d != NOBODY and models[d]:
                lengths[d] = passes[d]
            elif d != NOBODY:
                for k in range(lengths[d] + 1, passes[d] + 1):
                    if proposals[d, k, i] > proposals[d, k - 1, i]:
                        lengths[d] = k
    return lengths


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
