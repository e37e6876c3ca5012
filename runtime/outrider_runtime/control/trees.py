"""How deep and how wide the trees are that drafters propose: the argmax, where AdaServe (section 5.2) has a rule.

Chains are chosen first (`drafters`): who runs, and who asks whom. Then each drafter that can beam is weighed at every
depth and width, and the best of all stands. As with chains, a place in a beam counts where it pays for its token.

Shapes: D drafters, N decoding requests, K depths, W places at a depth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import NOBODY, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.drafters import EQUAL_SHORTFALL, MOST_FORCED, Choice, Pool, expected_s, shortfall
from outrider_runtime.control.value import worth

LEAST_DOUBT = 1e-9


class Beams(NamedTuple):
    """What the drafters' beams offer for the next step."""

    places: Floats
    """(D, K, W): how often the target's token is at each place of a depth, given that it was in the beam before."""
    hazards: Floats
    """(D, K): of chains."""
    pass_s: Floats
    """(D, W): seconds of each pass after the first, by width."""
    widest: Ints
    """(D,); 1: chains only."""


class Trees(NamedTuple):
    choice: Choice
    pool: Pool
    """With the seconds of passes as wide as was chosen."""
    widths: Ints
    """(D,)"""


class _Beside(NamedTuple):
    """What the others are asked for, where one drafter's trees are weighed."""

    share: Floats
    """(N,): how likely the request's proposals are this drafter's."""
    gain: Floats
    """(N,): tokens that the others bring."""
    proposals: float
    """Of the others, expected."""


def chosen(choice: Choice, pool: Pool, beams: Beams) -> Trees:
    """The choice with trees where they are worth more, or leave those behind their TPOT less short."""
    best = Trees(choice, pool, np.ones_like(beams.widest))
    if pool.paths.size and pool.longest:
        for drafter in np.flatnonzero((beams.widest > 1) & (pool.paths[:, :, 0] > 0).any(axis=1)).tolist():
            best = _with_trees_of(drafter, best, pool, beams)
    return best


@compiled
def most_gained(paths: Floats, beams: Beams) -> Floats:
    """(N,): the most tokens beyond the bonus token that any drafter is expected to bring. paths: (D, N, K)."""
    gains = np.zeros(paths.shape[1])
    for d in range(len(paths)):
        for i in range(len(gains)):
            gains[i] = max(gains[i], paths[d, i].sum())
        if beams.widest[d] > 1:
            rates = _place_rates(paths[d], beams.places[d], beams.hazards[d])
            gains = np.maximum(gains, _most(rates, beams.widest[d]))
    return gains


def _with_trees_of(drafter: int, so_far: Trees, pool: Pool, beams: Beams) -> Trees:
    choice, runs = so_far.choice, bool(so_far.choice.passes[drafter])
    beside = _beside(drafter, choice, pool) if runs else _nobody(drafter, pool)
    values, short = _weighed(drafter, beside, pool, beams, _others_s(drafter, choice, pool) if runs else 0.0)
    own = (int(choice.passes[drafter]), 0) if runs else (0, 0)
    values += choice.value - values[own] if runs else 0.0
    here = _shortfall(choice, pool) if not runs else float(short[own])
    least = min(here, float(short[:, 1:].min()))
    margin = EQUAL_SHORTFALL * float(pool.need.behind.sum())
    values[short > least + margin] = -np.inf
    values[:, 0] = -np.inf  # chains are chosen already
    depth, place = np.unravel_index(int(values.argmax()), values.shape)
    stays = here <= least + margin and choice.value >= values[depth, place]
    if stays or not depth:
        return so_far
    return _taken(drafter, int(depth), int(place) + 1, float(values[depth, place]), so_far, beams)


def _taken(drafter: int, depth: int, width: int, value: float, so_far: Trees, beams: Beams) -> Trees:
    choice, widths, passes_s = so_far.choice, so_far.widths.copy(), so_far.pool.pass_s.copy()
    passes, asked = choice.passes.copy(), choice.asked
    if not passes[drafter]:
        passes[:], widths[:] = 0, 1
        served = so_far.pool.paths[drafter, :, 0] > 0
        asked = np.stack([np.where(served, drafter, NOBODY), np.full(len(served), NOBODY)])
    passes[drafter], widths[drafter], passes_s[drafter] = depth, width, beams.pass_s[drafter, width - 1]
    choice = choice._replace(passes=passes, asked=asked, value=value, runs=True)
    return Trees(choice, so_far.pool._replace(pass_s=passes_s), widths)


def _nobody(drafter: int, pool: Pool) -> _Beside:
    share = np.where(pool.paths[drafter, :, 0] > 0, 1.0, 0.0)
    return _Beside(share, np.zeros(len(share)), 0.0)


def _beside(drafter: int, choice: Choice, pool: Pool) -> _Beside:
    return _Beside(*_others(drafter, choice.asked, choice.passes, pool.paths, pool.offers))


def _others_s(drafter: int, choice: Choice, pool: Pool) -> float:
    """Seconds of the others' drafts."""
    runs = choice.passes > 0
    runs[drafter] = False
    return float((runs * (pool.first_s + (choice.passes - 1) * pool.pass_s)).sum())


def _shortfall(choice: Choice, pool: Pool) -> float:
    """Tokens that those behind lack after a step with `choice`, in which the drafter that is weighed does not run."""
    _, gain, _ = _others(NOBODY, choice.asked, choice.passes, pool.paths, pool.offers)
    return float(shortfall(gain, *pool.need, pool.price.plain_s))


def _weighed(drafter: int, beside: _Beside, pool: Pool, beams: Beams, others_s: float) -> tuple[Floats, Floats]:
    """(K+1, W) twice: the worth of the drafter's trees of each depth and width, and how short they leave those behind.
    Of depth 0 nothing is said."""
    price, chains = pool.price, pool.paths[drafter]
    return _weigh(
        chains, _place_rates(chains, beams.places[drafter], beams.hazards[drafter]), beside.share, beside.gain,
        beside.proposals, pool.first_s[drafter] + others_s, beams.pass_s[drafter], int(beams.widest[drafter]),
        pool.longest, pool.token_s[drafter], price.token_s, price.node_s, price.ragged_s, price.rate,
        min(pool.budget, len(price.ragged_s) - 1), *pool.need,
    )  # fmt: skip


@compiled
def _others(drafter: int, asked: Ints, passes: Ints, paths: Floats, offers: Floats) -> tuple[Floats, Floats, float]:
    """The fields of `_Beside`. asked: (R, N), `drafter` among them."""
    requests = asked.shape[1]
    share, gain, proposals = np.zeros(requests), np.zeros(requests), 0.0
    for i in range(requests):
        left = 1.0  # nobody asked so far has a proposal
        for rank in range(asked.shape[0]):
            d = asked[rank, i]
            if d == drafter and d != NOBODY:
                share[i] = left
                break
            if d != NOBODY:
                for k in range(passes[d]):
                    there = left * offers[d, i, k] * (paths[d, i, k] > 0.0)
                    gain[i] += there * paths[d, i, k]
                    proposals += there
                left *= max(0.0, 1.0 - offers[d, i, 0])
    return share, gain, proposals


@compiled
def _place_rates(chains: Floats, places: Floats, hazards: Floats) -> Floats:
    """(N, K, W): how likely the target's token is at each place of a request's beam, given that it was in the beam
    before. A request differs from the others as its chains (N, K) do; 0 where it has no room."""
    requests, depths = chains.shape
    rates = np.zeros((requests, depths, places.shape[1]))
    for i in range(requests):
        factor = chains[i, 0] / (1.0 - chains[i, 0]) * (1.0 - hazards[0]) / hazards[0]
        for k in range(depths):
            if chains[i, k] <= 0.0:
                break
            doubt = max(LEAST_DOUBT, 1.0 - places[k, 0])
            odds = places[k, 0] / doubt * factor
            rates[i, k, 0] = odds / (1.0 + odds)
            for w in range(1, places.shape[1]):
                rates[i, k, w] = places[k, w] / doubt * (1.0 - rates[i, k, 0])
    return rates


@compiled
def _most(rates: Floats, widest: int) -> Floats:
    """(N,): tokens that the whole beam is expected to bring. rates: (N, K, W)"""
    gains = np.zeros(len(rates))
    for i in range(len(rates)):
        reach = 1.0
        for k in range(rates.shape[1]):
            reach *= rates[i, k, :widest].sum()
            gains[i] += reach
    return gains


@compiled
def _weigh(
    chains: Floats, rates: Floats, share: Floats, others: Floats, other_proposals: float, drafts_s: float,
    pass_s: Floats, widest: int, longest: int, read_s: float, token_s: float, node_s: Floats, ragged_s: Floats,
    rate: float, most: int, behind: Bools, need: Floats, need_per_s: Floats,
) -> tuple[Floats, Floats]:  # fmt: skip
    """See `_weighed`. chains: (N, K); rates: (N, K, W)"""
    requests, depths, _ = rates.shape
    values, short = np.full((depths + 1, widest), -np.inf), np.full((depths + 1, widest), np.inf)
    for w in range(widest):
        gains, nodes, reach = np.zeros(requests), np.zeros(requests), np.ones(requests)
        for k in range(min(depths, longest)):
            for i in range(requests):
                cost, before = rate * (token_s + read_s + node_s[i]), reach[i]
                reach[i] = 0.0
                for place in range(w + 1 if share[i] > 0.0 and before > 0.0 else 0):
                    path = chains[i, k] if w == 0 else before * rates[i, k, place]
                    lacks = behind[i] and nodes[i] < MOST_FORCED and gains[i] < need[i] + need_per_s[i] * ragged_s[0]
                    if path > (0.0 if lacks else cost):
                        gains[i] += path
                        nodes[i] += 1.0
                        reach[i] += path
            tokens = other_proposals + (share * nodes).sum()
            if tokens > most:
                break
            gained = others + share * gains
            seconds = drafts_s + k * pass_s[w] + expected_s(ragged_s, tokens, 0.0)
            values[k + 1, w] = worth(gained.sum(), seconds + (share * nodes * (node_s + read_s)).sum(), rate)
            short[k + 1, w] = shortfall(gained, behind, need, need_per_s, seconds)
    return values, short
