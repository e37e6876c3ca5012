"""The acceptance rate: how likely the target accepts a proposed token, given that it accepted the one before.

It is estimated by drafter, depth and bin of the drafter's own confidence (AdaServe section 4.2; the bins calibrate it),
times a factor for the request's class and a factor for the request. A single alpha for all depths would be biased,
since acceptance falls with depth and k varies. Both factors multiply odds, so that no probability exceeds 1, and are
shrunk to 1.

Shapes: D drafters, K depths, N requests, M nodes, B bins, G groups (see `trials`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider_runtime.control.acceptance import trials
from outrider_runtime.control.acceptance.groups import (
    EXPECTED_BINNED,
    EXPECTED_UNBINNED,
    MOST,
    TOTAL_TRIALS,
    class_factors,
    factor_of,
    pool_tried,
    with_factor,
)
from outrider_runtime.control.acceptance.trees import tree_paths
from outrider_runtime.control.acceptance.trials import (
    ANY,
    BINS,
    HIT_TRIALS,
    PRIOR_TRIALS,
    Counts,
    bin_of,
)
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import NO_DRAFTER, Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.data.forest import ROOT, Forest, Nodes
from outrider_runtime.control.settings import Drafter, Settings

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


class Acceptance:
    """Discounted counts, and the probabilities that follow from them."""

    def __init__(self, settings: Settings) -> None:
        drafters, depths = len(settings.drafters), max(1, settings.max_draft_tokens)
        binned, widest = (drafters, depths, BINS + 1), [drafter.widest for drafter in settings.drafters]
        self._known = Counts(
            tried=np.zeros(binned),
            accepted=np.zeros(binned),
            acceptance_rates=np.empty(binned),
            groups=np.zeros((drafters, 1 + settings.slots, TOTAL_TRIALS + 1)),
            scheduled=np.zeros((drafters, depths)),
            proposed=np.zeros((drafters, depths)),
            classes=0,
            has_history=np.zeros(drafters, dtype=bool),
            edges=np.array([drafter.confidence_edges for drafter in settings.drafters]).reshape(drafters, BINS - 1),
            passes=np.array([drafter.passes for drafter in settings.drafters], dtype=bool),
            most=np.array([_most(drafter, depths) for drafter in settings.drafters], np.int64),
            stands_in=np.array([drafter.stands_in for drafter in settings.drafters], dtype=bool),
            widest=np.array(widest, np.int64),
            ranks=np.zeros((drafters, max(widest, default=1), 2)),
            places=np.zeros((drafters, depths, max(widest, default=1), 2)),
        )
        self.columns: tuple[Any, ...]
        """Fields of `Counts`, in a plain tuple: compiled calls unpack it faster than a named one."""
        self.set_classes(len(settings.hot.slo_classes))
        self._aged_at: float | None = None
        trials.refresh(self._known)

    @property
    def acceptance_rates(self) -> Floats:
        """(D, K, B+1): posterior means, without the factors of class and request."""
        return self._known.acceptance_rates

    @property
    def has_history(self) -> Bools:
        """(D,): drafters that once had enough trials to trust their estimates."""
        return self._known.has_history

    def set_classes(self, classes: int) -> None:
        """Start the counts of classes again, since the classes have changed; all other counts stay."""
        of_slots = self._known.groups[:, 1 + self._known.classes :]
        of_classes = np.zeros((len(of_slots), 1 + classes, TOTAL_TRIALS + 1))
        self._known = self._known._replace(groups=np.concatenate([of_classes, of_slots], axis=1), classes=classes)
        self.columns = tuple(self._known)

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
            known.tried, known.accepted, known.scheduled, known.proposed, known.groups, known.ranks, known.places,
        ):  # fmt: skip
            counts *= keep
        trials.refresh(known)

    def release(self, slots: Ints) -> None:
        """Forget the requests in these slots, which have ended; the slots' next requests start without history."""
        self._known.groups[:, 1 + self._known.classes + slots] = 0.0

    def observe(self, batch: Batch, forest: Forest, verified: Bools, accepted: Bools, tried: Bools) -> None:
        """Count a step's trials. verified, accepted, tried: (M,), see `Outcome`."""
        columns, nodes = Columns(*batch.columns), Nodes(*forest.columns)
        verdicts, order = trials.Verdicts(verified, accepted, tried), np.ascontiguousarray(forest.drafter_order)
        trials.observe(self._known, columns, nodes, order, forest.lengths, verdicts)

    def node_paths(self, batch: Batch, forest: Forest) -> Floats:
        """(M,): see `node_paths`."""
        return node_paths(self._known, Columns(*batch.columns), Nodes(*forest.columns))

    def upper_paths(self) -> Floats:
        """(D, K): optimistic P(a chain of 1..K is accepted | it is proposed), for exploration: the product of rates
        that lie `UPPER_SIGMAS` posterior standard deviations above their means."""
        mean = self.acceptance_rates[:, :, ANY]
        spread = UPPER_SIGMAS * np.sqrt(mean * (1 - mean) / (self._known.tried[:, :, ANY] + PRIOR_TRIALS + 1))
        return np.asarray(np.minimum(mean + spread, MOST).cumprod(axis=1))


def _most(drafter: Drafter, depths: int) -> int:
    return depths if drafter.most_tokens is None else min(depths, drafter.most_tokens)


@compiled
def hit_rates(known: Counts) -> Floats:
    """(D, K): hit rate, P(a drafter has a proposal of depth k + 1), which never rises with k. A model proposes all
    depths or none, so its rate is that of depth 1."""
    hits = (known.proposed + HIT_TRIALS) / (known.scheduled + HIT_TRIALS)
    for k in range(1, hits.shape[1]):  # a depth that was seldom tried gets the rate of the one before it
        hits[:, k] = np.minimum(hits[:, k], hits[:, k - 1])
    for d in np.flatnonzero(known.stands_in):
        hits[d] = hits[d, 0]
    return np.asarray(hits)


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
    (drafters, depths), classes = known.acceptance_rates.shape[:2], known.classes
    paths, offers = np.zeros((drafters, depths, len(rows))), np.ones((drafters, depths))
    all_hits = hit_rates(known)
    for d in np.flatnonzero(usable):
        groups = known.groups[d]
        pool = pool_tried(groups, classes)
        of_class = class_factors(pool, groups, classes, EXPECTED_UNBINNED)
        offers[d] = all_hits[d]
        for n in range(len(rows)):
            i = rows[n]
            factor = factor_of(of_class, pool, groups, batch.slo_class[i], batch.slot[i], EXPECTED_UNBINNED)
            path = 1.0
            for k in range(min(limit, batch.left[i] - sure, known.most[d])):
                path *= with_factor(known.acceptance_rates[d, k, ANY], factor)
                paths[d, k, n] = path
    return paths, offers


@compiled
def node_paths(known: Counts, batch: Columns, nodes: Nodes) -> Floats:
    """(M,): path probability, P(the target accepts a node and all nodes above it); 0 if the request may not produce a
    token for it."""
    paths = _chain_node_paths(known, batch, nodes)
    return paths if known.ranks.shape[1] == 1 else tree_paths(known.ranks, paths, nodes, len(batch.slot))


@compiled
def placeholder_paths(
    known: Counts, batch: Columns, nodes: Nodes, drafter_order: Ints, lengths: Ints, placeholders: Bools, paths: Floats
) -> None:
    """Set the paths (M,) of placeholders, whose proposals are not known. `d` is the request's first drafter, `e` the
    one that is used when `d` finds nothing; hit rates are those of `chain_paths`:

        path[k] = hit[d, k] * prod(acceptance of d) + (1 - hit[d, 1]) * hit[e, k] * prod(acceptance of e)

    drafter_order: (R, N), lengths: (D,), placeholders: (N,), see `Forest`.
    """
    rows, limit = np.arange(len(batch.slot)), min(lengths.max(), known.acceptance_rates.shape[1])
    chains, hit = chain_paths(known, batch, rows, lengths > 0, limit, BONUS_TOKEN)
    for m in range(len(paths)):
        i, k = nodes.request[m], nodes.depth[m] - 1
        if not placeholders[i]:
            continue
        path, nothing_found = 0.0, 1.0
        for rank in range(drafter_order.shape[0]):
            d = drafter_order[rank, i]
            if d != NO_DRAFTER and lengths[d] > 0:
                path += nothing_found * hit[d, k] * chains[d, k, i] if k < lengths[d] else 0.0
                nothing_found *= 1.0 - hit[d, 0]
        paths[m] = path


@compiled
def _chain_node_paths(known: Counts, batch: Columns, nodes: Nodes) -> Floats:
    """Like `node_paths`, with every node judged as a first child."""
    (drafters, depths), classes, requests = known.acceptance_rates.shape[:2], known.classes, len(batch.slot)
    pools, of_class = np.empty(drafters), np.empty((drafters, 2, 1 + classes))
    for d in range(drafters):
        pools[d] = pool_tried(known.groups[d], classes)
        for column in (EXPECTED_BINNED, EXPECTED_UNBINNED):
            of_class[d, column - EXPECTED_BINNED] = class_factors(pools[d], known.groups[d], classes, column)
    paths, factors = np.empty(len(nodes.request)), np.zeros((drafters, requests, 2))
    for m in range(len(paths)):
        d, i, parent = nodes.drafter[m], nodes.request[m], nodes.parent[m]
        column = EXPECTED_UNBINNED if np.isnan(nodes.confidence[m]) else EXPECTED_BINNED
        own = factors[d, i]
        if own[column - EXPECTED_BINNED] == 0.0:
            of_classes, groups = of_class[d, column - EXPECTED_BINNED], known.groups[d]
            own[column - EXPECTED_BINNED] = factor_of(
                of_classes, pools[d], groups, batch.slo_class[i], batch.slot[i], column
            )
        rate = known.acceptance_rates[d, min(nodes.depth[m], depths) - 1, bin_of(nodes.confidence[m], known.edges[d])]
        before = 1.0 if parent == ROOT else paths[parent]
        path = before * with_factor(rate, own[column - EXPECTED_BINNED])
        paths[m] = path if nodes.depth[m] < batch.left[i] else 0.0
    return paths
