"""How likely the target accepts a proposed token, given that it accepted the one before.

By drafter, depth and bin of the drafter's own confidence (AdaServe section 4.2; the bins calibrate it), times one
factor each for the request's class and the request. One geometric alpha is biased where acceptance falls with depth and
k varies. Both factors multiply odds, so nothing passes 1, and are shrunk to 1.

Shapes: D drafters, K depths, N requests, M nodes, B bins, G groups (see `trials`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider_runtime.control.acceptance import trials
from outrider_runtime.control.acceptance.groups import (
    EVERY,
    EXPECTED,
    EXPECTED_ANY,
    MOST,
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
from outrider_runtime.control.data.batch import NOBODY, Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.data.forest import ROOT, Forest, Nodes
from outrider_runtime.control.settings import Drafter, Settings

AGE_HALF_LIFE_S = 30.0
"""Evidence ages by time: by observation alone, k = 0 would keep its own verdict for ever."""
AGE_EVERY_S = 0.435
"""By one percent, as a rule."""
UPPER_SIGMAS = 1.5
OF_THIS_STEP = 2
"""Tokens that a request gets in any case before one of its proposals counts: this step's, and the bonus token."""
BONUS_TOKEN = 1
"""Tokens that a request gets before one of the proposals that its own step verifies counts."""


class Acceptance:
    """Discounted counts, and the probabilities that follow from them."""

    def __init__(self, settings: Settings) -> None:
        drafters, depths = len(settings.drafters), max(1, settings.max_draft_tokens)
        binned, widest = (drafters, depths, BINS + 1), [one.widest for one in settings.drafters]
        self._known = Counts(
            tried=np.zeros(binned),
            accepted=np.zeros(binned),
            hazards=np.empty(binned),
            groups=np.zeros((drafters, 1 + settings.slots, EVERY + 1)),
            asked=np.zeros((drafters, depths)),
            offered=np.zeros((drafters, depths)),
            classes=0,
            met=np.zeros(drafters, dtype=bool),
            edges=np.array([one.confidence_edges for one in settings.drafters]).reshape(drafters, BINS - 1),
            passes=np.array([one.passes for one in settings.drafters], dtype=bool),
            most=np.array([_most(drafter, depths) for drafter in settings.drafters], np.int64),
            stands_in=np.array([drafter.stands_in for drafter in settings.drafters], dtype=bool),
            widest=np.array(widest, np.int64),
            ranks=np.zeros((drafters, max(widest, default=1), 2)),
            places=np.zeros((drafters, depths, max(widest, default=1), 2)),
        )
        self.columns: tuple[Any, ...]
        """As `Counts`, in a plain tuple, which a call unpacks faster."""
        self.set_classes(len(settings.hot.slo_classes))
        self._aged_at: float | None = None
        trials.refresh(self._known)

    @property
    def hazards(self) -> Floats:
        """(D, K, B+1): posterior means, without the factors."""
        return self._known.hazards

    @property
    def met(self) -> Bools:
        """(D,): drafters that were tried often enough once to be no strangers."""
        return self._known.met

    def set_classes(self, classes: int) -> None:
        """The classes have changed: what was known of them goes, of everything else it stays."""
        of_slots = self._known.groups[:, 1 + self._known.classes :]
        of_classes = np.zeros((len(of_slots), 1 + classes, EVERY + 1))
        self._known = self._known._replace(groups=np.concatenate([of_classes, of_slots], axis=1), classes=classes)
        self.columns = tuple(self._known)

    def age(self, now: float) -> None:
        """Let evidence age, also where nothing is observed (k = 0). A clock that jumps back ages nothing, nor does one
        that says nothing."""
        if not math.isfinite(now):
            return
        if self._aged_at is None or now < self._aged_at:
            self._aged_at = now
        if now - self._aged_at < AGE_EVERY_S:
            return
        keep = 0.5 ** ((now - self._aged_at) / AGE_HALF_LIFE_S)
        self._aged_at, known = now, self._known
        for counts in (
            known.tried, known.accepted, known.asked, known.offered, known.groups, known.ranks, known.places,
        ):  # fmt: skip
            counts *= keep
        trials.refresh(known)

    def release(self, slots: Ints) -> None:
        """These requests have ended; whoever comes into their slots is a stranger."""
        self._known.groups[:, 1 + self._known.classes + slots] = 0.0

    def observe(self, batch: Batch, forest: Forest, verified: Bools, accepted: Bools, tried: Bools) -> None:
        """Count a step's trials. verified, accepted, tried: (M,), as `Outcome` has them."""
        columns, nodes = Columns(*batch.columns), Nodes(*forest.columns)
        verdicts, asked = trials.Verdicts(verified, accepted, tried), np.ascontiguousarray(forest.asked)
        trials.observe(self._known, columns, nodes, asked, forest.lengths, verdicts)

    def node_paths(self, batch: Batch, forest: Forest) -> Floats:
        """(M,): see `node_paths`."""
        return node_paths(self._known, Columns(*batch.columns), Nodes(*forest.columns))

    def upper_paths(self) -> Floats:
        """(D, K): paths that are optimistic by some posterior standard deviations, given that there is a proposal, for
        exploration."""
        mean = self.hazards[:, :, ANY]
        spread = UPPER_SIGMAS * np.sqrt(mean * (1 - mean) / (self._known.tried[:, :, ANY] + PRIOR_TRIALS + 1))
        return np.asarray(np.minimum(mean + spread, MOST).cumprod(axis=1))


def _most(drafter: Drafter, depths: int) -> int:
    return depths if drafter.most_tokens is None else min(depths, drafter.most_tokens)


@compiled
def hit_rates(known: Counts) -> Floats:
    """(D, K): P(a drafter has a proposal of depth k + 1), which never rises with k; one that stands in has all or
    none."""
    hits = (known.offered + HIT_TRIALS) / (known.asked + HIT_TRIALS)
    for k in range(1, hits.shape[1]):  # a depth that was seldom tried is as likely as the one before it
        hits[:, k] = np.minimum(hits[:, k], hits[:, k - 1])
    for d in np.flatnonzero(known.stands_in):
        hits[d] = hits[d, 0]
    return np.asarray(hits)


@compiled
def chain_paths(
    known: Counts, batch: Columns, rows: Ints, usable: Bools, limit: int, sure: int
) -> tuple[Floats, Floats]:  # fmt: skip
    """(D, K, N) for N `rows` of the batch: the probability that the target accepts a chain of 1..K, if it is proposed.
    (D, K): the hit rates, P(the drafter has a proposal of that depth); of a model, of any depth.

    A path is 0 past `limit` positions, past what the drafter proposes at most and what the request can still use, and
    where the drafter is not `usable` (D,).
    sure: tokens that a request gets before one of its proposals counts.
    """
    (drafters, depths), classes = known.hazards.shape[:2], known.classes
    paths, offers = np.zeros((drafters, depths, len(rows))), np.ones((drafters, depths))
    all_hits = hit_rates(known)
    for d in np.flatnonzero(usable):
        groups = known.groups[d]
        pool = pool_tried(groups, classes)
        of_class = class_factors(pool, groups, classes, EXPECTED_ANY)
        offers[d] = all_hits[d]
        for n in range(len(rows)):
            i = rows[n]
            factor = factor_of(of_class, pool, groups, batch.slo_class[i], batch.slot[i], EXPECTED_ANY)
            path = 1.0
            for k in range(min(limit, batch.left[i] - sure, known.most[d])):
                path *= with_factor(known.hazards[d, k, ANY], factor)
                paths[d, k, n] = path
    return paths, offers


@compiled
def node_paths(known: Counts, batch: Columns, nodes: Nodes) -> Floats:
    """(M,): the probability that the target accepts each node and all that it hangs on; 0 for one that the request has
    no token left for."""
    paths = _chain_node_paths(known, batch, nodes)
    return paths if known.ranks.shape[1] == 1 else tree_paths(known.ranks, paths, nodes, len(batch.slot))


@compiled
def placeholder_paths(
    known: Counts, batch: Columns, nodes: Nodes, drafter_order: Ints, lengths: Ints, placeholders: Bools, paths: Floats
) -> None:
    """Set the paths (M,) of nodes whose proposals are not known: with the hit rates of `chain_paths`, and `e` the
    drafter that stands in where `d` finds nothing,

        path[k] = hit[d, k] * prod(acceptance of d) + (1 - hit[d, 1]) * hit[e, k] * prod(acceptance of e)

    drafter_order: (R, N), lengths: (D,), placeholders: (N,), as in `Forest`.
    """
    rows, limit = np.arange(len(batch.slot)), min(lengths.max(), known.hazards.shape[1])
    chains, hit = chain_paths(known, batch, rows, lengths > 0, limit, BONUS_TOKEN)
    for m in range(len(paths)):
        i, k = nodes.request[m], nodes.depth[m] - 1
        if not placeholders[i]:
            continue
        path, nothing_found = 0.0, 1.0
        for rank in range(drafter_order.shape[0]):
            d = drafter_order[rank, i]
            if d != NOBODY and lengths[d] > 0:
                path += nothing_found * hit[d, k] * chains[d, k, i] if k < lengths[d] else 0.0
                nothing_found *= 1.0 - hit[d, 0]
        paths[m] = path


@compiled
def _chain_node_paths(known: Counts, batch: Columns, nodes: Nodes) -> Floats:
    """The same, each node judged as a first child."""
    (drafters, depths), classes, requests = known.hazards.shape[:2], known.classes, len(batch.slot)
    pools, of_class = np.empty(drafters), np.empty((drafters, 2, 1 + classes))
    for d in range(drafters):
        pools[d] = pool_tried(known.groups[d], classes)
        for column in (EXPECTED, EXPECTED_ANY):
            of_class[d, column - EXPECTED] = class_factors(pools[d], known.groups[d], classes, column)
    paths, factors = np.empty(len(nodes.request)), np.zeros((drafters, requests, 2))
    for m in range(len(paths)):
        d, i, parent = nodes.drafter[m], nodes.request[m], nodes.parent[m]
        column = EXPECTED_ANY if np.isnan(nodes.confidence[m]) else EXPECTED
        own = factors[d, i]
        if own[column - EXPECTED] == 0.0:
            of_classes, groups = of_class[d, column - EXPECTED], known.groups[d]
            own[column - EXPECTED] = factor_of(of_classes, pools[d], groups, batch.slo_class[i], batch.slot[i], column)
        hazard = known.hazards[d, min(nodes.depth[m], depths) - 1, bin_of(nodes.confidence[m], known.edges[d])]
        before = 1.0 if parent == ROOT else paths[parent]
        path = before * with_factor(hazard, own[column - EXPECTED])
        paths[m] = path if nodes.depth[m] < batch.left[i] else 0.0
    return paths
