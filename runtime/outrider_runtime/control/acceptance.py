"""Acceptance rates: how likely the target accepts a proposed token, given that it accepted the one before.

A rate is estimated from decaying counts by drafter and depth, times a factor on the odds for the request. A single
alpha for all depths would be biased, since acceptance falls with depth and k varies.

Shapes: D drafters, K depths, S slots of requests; N requests, M nodes, R ranks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.control.batch import NO_DRAFTER, Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.plans import ROOT, Forest, Nodes
from outrider_runtime.control.settings import Drafter, Settings
from outrider_runtime.control.trees import count_trees, tree_paths

MOST_TRIALS = 150.0
"""Most trials that an estimate rests on, so that it follows the traffic."""
PRIOR, PRIOR_TRIALS = 0.6, 4.0
"""Prior acceptance rate of the first depth, and the trials that it counts for."""
DEPTH_TRIALS = 12.0
"""Trials that the rate of the depth before counts for in a depth's rate: few requests reach deep positions, and those
are the easy ones."""
HISTORY_TRIALS, HISTORY_REQUESTS = 12.0, 7.0
"""A drafter has history after so many trials of its first position, or so many scheduled requests: those of one
exploration of a lone request, less what decays meanwhile. More would make a drafter without proposals replace one that
has them."""
HIT_TRIALS = 2.0
"""Trials that a hit rate of 1 counts for."""
SHRINKAGE_TRIALS, MOST_REQUEST_TRIALS = 6.0, 60.0
"""Trials that a factor of 1 counts for; most trials that a factor rests on, so that it follows the text."""
LEAST, MOST = 0.01, 0.99
"""Bounds of every probability."""
RECENT_TRIALS, RECENT_ACCEPTED, RECENT_EXPECTED, TOTAL_TRIALS = range(4)
"""Columns of a request's counts: recent trials; how many of them were accepted; how many of them the estimate for all
requests expected to be accepted; and all trials."""
AGE_HALF_LIFE_S = 30.0
"""Half-life of evidence. It decays with time, not with observations: at k = 0 nothing is observed, so an estimate that
led to k = 0 would never change."""
DECAY_INTERVAL_S = 0.435
"""Shortest time between two decays, of about 1% each."""
UPPER_SIGMAS = 1.5
"""Posterior standard deviations that an optimistic acceptance rate lies above the mean."""
GUARANTEED_TOKENS = 2
"""Tokens that a request gets before one of its new proposals counts: this step's token and the next step's bonus
token."""
BONUS_TOKEN = 1
"""Tokens that a request gets before one of the proposals that its own step verifies counts."""


class Verdicts(NamedTuple):
    """The verdicts on a step's nodes, see `Outcome`. All (M,)."""

    verified: Bools
    accepted: Bools
    tried: Bools


class Counts(NamedTuple):
    """All counts, which are updated in place, and the rates that follow from them."""

    tried: Floats
    """(D, K)"""
    accepted: Floats
    """(D, K)"""
    acceptance_rates: Floats
    """(D, K): posterior means, without the requests' factors."""
    requests: Floats
    """(D, S, 4): RECENT_TRIALS and so on."""
    all_trials: Floats
    """(D,): trials of all requests."""
    scheduled: Floats
    """(D, K): number of scheduled proposals of at least that depth."""
    proposed: Floats
    """(D, K): how many of them the drafter had."""
    has_history: Bools
    """(D,): drafters that once had enough trials to trust their estimates."""
    autoregressive: Bools
    """(D,): every token is a pass."""
    stands_in: Bools
    """(D,): see `settings.Drafter`."""
    most: Ints
    """(D,): largest draft length of each drafter."""
    widest: Ints
    """(D,): see `settings.Drafter`."""
    ranks: Floats
    """(D, W, 2): counts of later children by rank, see `trees`. W is 1 if no drafter can propose trees."""
    places: Floats
    """(D, K, W, 2): counts of places in beams, see `trees`."""


@compiled
def observe_trials(
    known: Counts, batch: Columns, nodes: Nodes, drafter_order: Ints, lengths: Ints, verdicts: Verdicts
) -> None:  # fmt: skip
    """Count a step's trials. drafter_order (R, N), lengths (D,): see `Forest`. A later child is no trial of a chain."""
    accepted, trials = verdicts.accepted, verdicts.tried
    if known.ranks.shape[1] > 1:
        count_trees(known.ranks, known.places, nodes, verdicts.verified, accepted, len(batch.slot))
        trials = trials & (nodes.rank == 0)
    _count_hits(known, nodes, drafter_order, lengths, batch.left)
    _count_trials(known, nodes, trials, accepted)
    for m in np.flatnonzero(trials):
        d, i = nodes.drafter[m], nodes.request[m]
        rates = known.acceptance_rates[d]
        count_trial(known.requests[d, batch.slot[i]], rates[min(nodes.depth[m], len(rates)) - 1], accepted[m])
        known.all_trials[d] += 1.0
    for d in range(len(known.has_history)):
        known.has_history[d] |= known.tried[d, 0] >= HISTORY_TRIALS or known.scheduled[d, 0] >= HISTORY_REQUESTS


@compiled
def _count_hits(known: Counts, nodes: Nodes, drafter_order: Ints, lengths: Ints, left: Ints) -> None:
    """Count scheduled proposals and those that drafters had. A missing proposal does not count where the request may
    not produce a token for it."""
    scheduled, proposed = known.scheduled, known.proposed
    (drafters, depths), requests = scheduled.shape, drafter_order.shape[1]
    deepest = np.zeros((drafters, requests), np.int64)
    for m in range(len(nodes.request)):
        d, i = nodes.drafter[m], nodes.request[m]
        deepest[d, i] = max(deepest[d, i], nodes.depth[m])
    for i in range(requests):
        for rank in range(drafter_order.shape[0]):
            d = drafter_order[rank, i]
            if d == NO_DRAFTER:
                break
            length = min(deepest[d, i], depths)
            scheduled[d, : min(max(min(lengths[d], left[i] - 1), length), depths)] += 1.0
            proposed[d, :length] += 1.0
            if length > 0:
                break
    _limit(scheduled, proposed)


@compiled
def _count_trials(known: Counts, nodes: Nodes, trials: Bools, accepted: Bools) -> None:
    """Count trials and acceptances by depth."""
    tried, successes = known.tried, known.accepted
    for m in np.flatnonzero(trials):
        d, k = nodes.drafter[m], min(nodes.depth[m], tried.shape[1]) - 1
        tried[d, k] += 1.0
        successes[d, k] += accepted[m]
    _limit(tried, successes)
    refresh(known)


@compiled
def _limit(tried: Floats, successes: Floats) -> None:
    """Keep the counts (D, K) to MOST_TRIALS, so that estimates follow the traffic."""
    for d in range(tried.shape[0]):
        for k in range(tried.shape[1]):
            if tried[d, k] > MOST_TRIALS:
                successes[d, k] *= MOST_TRIALS / tried[d, k]
                tried[d, k] = MOST_TRIALS


@compiled
def refresh(known: Counts) -> None:
    """Set the posterior means: each depth shrinks to the one before it, the first to the prior."""
    for d in range(known.tried.shape[0]):
        mean, strength = PRIOR, PRIOR_TRIALS
        for k in range(known.tried.shape[1]):
            mean = (known.accepted[d, k] + strength * mean) / (known.tried[d, k] + strength)
            known.acceptance_rates[d, k] = min(mean, MOST)
            strength = DEPTH_TRIALS


@compiled
def with_factor(chance: float, factor: float) -> float:
    """The probability whose odds are those of `chance` times `factor`."""
    odds = chance / (1.0 - chance) * factor
    return float(min(odds / (1.0 + odds), MOST))


@compiled
def factor_of(request: Floats, all_trials: float) -> float:
    """Odds of acceptance of a request / odds that are expected of all requests. request: (4,), its counts. all_trials:
    trials of all requests.

    The request's own mean counts with weight `max(0, n - s * p / (1 - p)) / (n + s)`, n recent trials, s
    SHRINKAGE_TRIALS, p the request's share of all trials: its trials are part of the mean of all, so a request that
    made all trials cannot differ from it.
    """
    recent, strength = request[RECENT_TRIALS], SHRINKAGE_TRIALS
    if recent <= 0.0:
        return 1.0
    share = min(0.999, request[TOTAL_TRIALS] / max(all_trials, 1e-9))
    weight = max(0.0, recent - strength * share / (1.0 - share)) / (recent + strength)
    mean = min(max(request[RECENT_EXPECTED] / recent, LEAST), MOST)
    own = min(max(mean + weight * (request[RECENT_ACCEPTED] / recent - mean), LEAST), MOST)
    return float(own * (1.0 - mean) / ((1.0 - own) * mean))


@compiled
def count_trial(request: Floats, expected: float, accepted: bool) -> None:
    """Count one trial of a request. request: (4,), its counts. expected: the acceptance rate expected of all
    requests."""
    request[:TOTAL_TRIALS] *= min(1.0, MOST_REQUEST_TRIALS / (request[RECENT_TRIALS] + 1.0))
    request[RECENT_TRIALS] += 1.0
    request[RECENT_ACCEPTED] += accepted
    request[RECENT_EXPECTED] += expected
    request[TOTAL_TRIALS] += 1.0


class Acceptance:
    """Discounted counts, and the probabilities that follow from them."""

    def __init__(self, settings: Settings) -> None:
        drafters, depths = len(settings.drafters), max(1, settings.max_draft_tokens)
        widest = [drafter.widest for drafter in settings.drafters]
        self._known = Counts(
            tried=np.zeros((drafters, depths)),
            accepted=np.zeros((drafters, depths)),
            acceptance_rates=np.empty((drafters, depths)),
            requests=np.zeros((drafters, settings.slots, TOTAL_TRIALS + 1)),
            all_trials=np.zeros(drafters),
            scheduled=np.zeros((drafters, depths)),
            proposed=np.zeros((drafters, depths)),
            has_history=np.zeros(drafters, dtype=bool),
            autoregressive=np.array([drafter.passes for drafter in settings.drafters], dtype=bool),
            most=np.array([_most(drafter, depths) for drafter in settings.drafters], np.int64),
            stands_in=np.array([drafter.stands_in for drafter in settings.drafters], dtype=bool),
            widest=np.array(widest, np.int64),
            ranks=np.zeros((drafters, max(widest, default=1), 2)),
            places=np.zeros((drafters, depths, max(widest, default=1), 2)),
        )
        self.columns: tuple[Any, ...] = tuple(self._known)
        """Fields of `Counts`, in a plain tuple: compiled calls unpack it faster than a named one."""
        self._aged_at: float | None = None
        refresh(self._known)

    @property
    def acceptance_rates(self) -> Floats:
        """(D, K): posterior means, without the requests' factors."""
        return self._known.acceptance_rates

    @property
    def has_history(self) -> Bools:
        """(D,): drafters that once had enough trials to trust their estimates."""
        return self._known.has_history

    def age(self, now_s: float) -> None:
        """Let evidence decay, even if nothing is observed (k = 0). Nothing decays if the clock jumps back, or if the
        time is not a finite number."""
        if not math.isfinite(now_s):
            return
        if self._aged_at is None or now_s < self._aged_at:
            self._aged_at = now_s
        if now_s - self._aged_at < DECAY_INTERVAL_S:
            return
        keep = 0.5 ** ((now_s - self._aged_at) / AGE_HALF_LIFE_S)
        self._aged_at, known = now_s, self._known
        for counts in (
            known.tried, known.accepted, known.scheduled, known.proposed, known.requests, known.all_trials, known.ranks,
            known.places,
        ):  # fmt: skip
            counts *= keep
        refresh(known)

    def release(self, slots: Ints) -> None:
        """Forget the requests in these slots, which have ended; the slots' next requests start without history."""
        self._known.requests[:, slots] = 0.0

    def observe(self, batch: Batch, forest: Forest, verified: Bools, accepted: Bools, tried: Bools) -> None:
        """Count a step's trials. verified, accepted, tried: (M,), see `Outcome`."""
        columns, nodes = Columns(*batch.columns), Nodes(*forest.columns)
        verdicts, order = Verdicts(verified, accepted, tried), np.ascontiguousarray(forest.drafter_order)
        observe_trials(self._known, columns, nodes, order, forest.lengths, verdicts)

    def node_paths(self, batch: Batch, forest: Forest) -> Floats:
        """(M,): see `node_paths`."""
        return node_paths(self._known, Columns(*batch.columns), Nodes(*forest.columns))

    def upper_paths(self) -> Floats:
        """(D, K): optimistic P(a chain of 1..K is accepted | it is proposed), for exploration: the product of rates
        that lie `UPPER_SIGMAS` posterior standard deviations above their means."""
        mean = self.acceptance_rates
        spread = UPPER_SIGMAS * np.sqrt(mean * (1 - mean) / (self._known.tried + PRIOR_TRIALS + 1))
        return np.asarray(np.minimum(mean + spread, MOST).cumprod(axis=1))


def _most(drafter: Drafter, depths: int) -> int:
    return depths if drafter.most_tokens is None else min(depths, drafter.most_tokens)


@compiled
def hit_rates(known: Counts) -> Floats:
    """(D, K): hit rate, P(a drafter has a proposal of depth k + 1), which never rises with k. A model proposes all
    depths or none, so its rate is that of depth 1."""
    drafters, depths = known.proposed.shape
    hits = np.empty((drafters, depths))
    for d in range(drafters):
        for k in range(depths):
            rate = (known.proposed[d, k] + HIT_TRIALS) / (known.scheduled[d, k] + HIT_TRIALS)
            if k > 0:  # a depth that was seldom tried gets the rate of the one before it
                rate = hits[d, 0] if known.stands_in[d] else min(rate, hits[d, k - 1])
            hits[d, k] = rate
    return hits


@compiled
def chain_paths(
    known: Counts, batch: Columns, rows: Ints, usable: Bools, limit: int, sure: int
) -> tuple[Floats, Floats]:  # fmt: skip
    """(D, K, N) for N `rows` of the batch: P(the target accepts a chain of 1..K | it is proposed), and (D, K) hit
    rates.

    A path is 0 past `limit` positions, past the drafter's largest draft length, past the tokens that the request may
    still produce, and if the drafter is not `usable` (D,). sure: tokens that a request gets before one of its proposals
    counts.
    """
    drafters, depths = known.acceptance_rates.shape
    paths, hits = np.zeros((drafters, depths, len(rows))), np.ones((drafters, depths))
    all_hits = hit_rates(known)
    for d in np.flatnonzero(usable):
        hits[d] = all_hits[d]
        for n in range(len(rows)):
            i, path = rows[n], 1.0
            factor = factor_of(known.requests[d, batch.slot[i]], known.all_trials[d])
            for k in range(min(limit, batch.left[i] - sure, known.most[d])):
                path *= with_factor(known.acceptance_rates[d, k], factor)
                paths[d, k, n] = path
    return paths, hits


@compiled
def node_paths(known: Counts, batch: Columns, nodes: Nodes) -> Floats:
    """(M,): path probability, P(the target accepts a node and all nodes above it); 0 if the request may not produce a
    token for it."""
    paths = _chain_node_paths(known, batch, nodes)
    return paths if known.ranks.shape[1] == 1 else tree_paths(known.ranks, paths, nodes, len(batch.slot))


@compiled
def _chain_node_paths(known: Counts, batch: Columns, nodes: Nodes) -> Floats:
    """Like `node_paths`, with every node judged as a first child."""
    (drafters, depths), paths = known.acceptance_rates.shape, np.empty(len(nodes.request))
    factors = np.zeros((drafters, len(batch.slot)))
    for m in range(len(paths)):
        d, i, parent = nodes.drafter[m], nodes.request[m], nodes.parent[m]
        if factors[d, i] == 0.0:
            factors[d, i] = factor_of(known.requests[d, batch.slot[i]], known.all_trials[d])
        before = 1.0 if parent == ROOT else paths[parent]
        path = before * with_factor(known.acceptance_rates[d, min(nodes.depth[m], depths) - 1], factors[d, i])
        paths[m] = path if nodes.depth[m] < batch.left[i] else 0.0
    return paths
