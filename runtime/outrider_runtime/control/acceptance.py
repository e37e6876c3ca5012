"""How likely the target accepts a proposed token, given that it accepted the one before.

By drafter, depth and bin of the drafter's own confidence (AdaServe section 4.2; the bins calibrate it), times one
factor each for the request's class and the request. One geometric alpha is biased where acceptance falls with depth and
k varies. Both factors multiply odds, so nothing passes 1, and are shrunk to 1.

Shapes: D drafters, K depths, N requests, M nodes, B bins, G groups (see `trials`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.forest import ROOT, Forest
from outrider_runtime.control.settings import Settings
from outrider_runtime.control.siblings import Siblings
from outrider_runtime.control.trials import (
    ANY,
    BINS,
    EVERY,
    EXPECTED,
    EXPECTED_ANY,
    HIT_TRIALS,
    MOST,
    PRIOR_TRIALS,
    SLOT_HIT_TRIALS,
    bin_of,
    class_factors,
    factor_of,
    observe,
    pool_tried,
    refresh,
    with_factor,
)

AGE_HALF_LIFE_S = 30.0
"""Evidence ages by time: by observation alone, k = 0 would keep its own verdict for ever."""
AGE_EVERY_S = 0.435
"""By one percent, as a rule."""
OF_THIS_STEP = 2
"""Tokens that a request gets in any case before one of its proposals counts: this step's, and the bonus token."""


class Known(NamedTuple):
    """What compiled code reads of it to look ahead; see `Acceptance`."""

    hazards: Floats
    groups: Floats
    asked: Floats
    offered: Floats
    slot_hits: Floats
    passes: Bools


class Acceptance:
    """Discounted counts, and the probabilities that follow from them."""

    def __init__(self, settings: Settings) -> None:
        drafters, depths = len(settings.drafters), max(1, settings.max_draft_tokens)
        self._edges = np.array([drafter.confidence_edges for drafter in settings.drafters]).reshape(drafters, BINS - 1)
        self._tried = np.zeros((drafters, depths, BINS + 1))
        self._accepted = np.zeros((drafters, depths, BINS + 1))
        self.hazards = np.empty((drafters, depths, BINS + 1))
        """(D, K, B+1): posterior means, without the factors."""
        self._asked = np.zeros((drafters, depths))
        self._offered = np.zeros((drafters, depths))
        self._slot_hits = np.zeros((settings.slots, drafters, 2))  # [asked, found something]
        self._recent = np.zeros((drafters, 3))  # [accepted, expected, variance] of the last trials
        self._passes = np.array([drafter.passes for drafter in settings.drafters], dtype=bool)
        self._slots, self._classes = settings.slots, -1
        self._groups = np.zeros((drafters, 0, EVERY + 1))
        self.set_classes(len(settings.hot.slo_classes))
        self.met = np.zeros(drafters, dtype=bool)
        """(D,): drafters that were tried often enough once to be no strangers."""
        self.all_met = not drafters
        widest = max((drafter.widest for drafter in settings.drafters), default=1)
        self.siblings = Siblings(drafters, depths, widest) if widest > 1 else None
        """None where nobody can propose trees."""
        self.alarms = 0
        """How often the last trials contradicted the estimate: the traffic has changed."""
        self._aged_at: float | None = None
        refresh(self._tried, self._accepted, self.hazards)

    def set_classes(self, classes: int) -> None:
        """The classes have changed: what was known of them goes, of everything else it stays."""
        old = self._groups[:, self._classes + 1 :]
        self._classes = classes
        self._groups = np.zeros((len(self.hazards), classes + 1 + self._slots, EVERY + 1))
        self._groups[:, classes + 1 :][:, : old.shape[1]] = old

    def age(self, now: float) -> None:
        """Let evidence age, also where nothing is observed (k = 0)."""
        if self._aged_at is None:
            self._aged_at = now
        if now - self._aged_at < AGE_EVERY_S:
            return
        keep = 0.5 ** ((now - self._aged_at) / AGE_HALF_LIFE_S)
        self._aged_at = now
        for counts in (self._tried, self._accepted, self._asked, self._offered, self._slot_hits, self._recent):
            counts *= keep
        self._groups *= keep
        if self.siblings is not None:
            self.siblings.age(keep)
        refresh(self._tried, self._accepted, self.hazards)

    def release(self, slots: Ints) -> None:
        """These requests have ended; whoever comes into their slots is a stranger."""
        _forget(self._groups, self._slot_hits, slots)

    def observe(self, batch: Batch, forest: Forest, tried: Bools, accepted: Bools) -> None:
        """Count a step's trials. tried, accepted: (M,), as `Outcome` has them. A later child is no trial of a chain."""
        if self.siblings is not None:
            tried = tried & (forest.rank == 0)
        asked = np.ascontiguousarray(forest.asked)
        self.alarms += observe(
            asked, forest.lengths, forest.request, forest.drafter, forest.depth, forest.confidence, tried, accepted,
            self._classes, batch.slot, batch.slo_class, self._edges, self._asked, self._offered, self._slot_hits,
            self._tried, self._accepted, self.hazards, self._groups, self._recent, self.met,
        )  # fmt: skip
        self.all_met = self.all_met or bool(self.met.all())

    @property
    def columns(self) -> tuple[Floats, Floats, Floats, Floats, Floats, Bools]:
        """As `Known`, as each call from Python takes it fastest."""
        return self.hazards, self._groups, self._asked, self._offered, self._slot_hits, self._passes

    def node_paths(self, batch: Batch, forest: Forest) -> Floats:
        """(M,): the probability that the target accepts each node and all that it hangs on; 0 for one that the request
        has no token left for."""
        paths = _node_paths(
            self.hazards, self._groups, self._classes, batch.slot, batch.slo_class, batch.left,
            forest.request, forest.parent, forest.drafter, forest.depth, forest.confidence, self._edges,
        )  # fmt: skip
        return paths if self.siblings is None else self.siblings.paths(forest, paths, len(batch))

    def upper_paths(self) -> Floats:
        """(D, K): paths that are optimistic by one posterior standard deviation, offers included, for exploration."""
        mean = self.hazards[:, :, ANY]
        spread = np.sqrt(mean * (1 - mean) / (self._tried[:, :, ANY] + PRIOR_TRIALS + 1))
        return np.asarray(np.minimum(mean + spread, MOST).cumprod(axis=1) * self.hit_rates)

    @property
    def hit_rates(self) -> Floats:
        """(D, K): how often a drafter that is asked for so many tokens has them."""
        return np.asarray((self._offered + HIT_TRIALS) / (self._asked + HIT_TRIALS))


@compiled
def _forget(groups: Floats, slot_hits: Floats, slots: Ints) -> None:
    for slot in slots:
        groups[:, groups.shape[1] - len(slot_hits) + slot] = 0.0
        slot_hits[slot] = 0.0


@compiled
def chain_paths(known: Known, batch: Columns, rows: Ints, usable: Bools, limit: int) -> tuple[Floats, Floats]:
    """Two (D, N, K) for N `rows` of the batch: the probability that the target accepts a chain of 1..K, if it is
    proposed, and that the drafter has a proposal of that depth. A path is 0 past `limit` positions, past what the
    request can still use, and where the drafter is not `usable` (D,)."""
    drafters, depths = known.hazards.shape[:2]
    classes = known.groups.shape[1] - 1 - known.slot_hits.shape[0]
    paths = np.zeros((drafters, len(rows), depths))
    offers = np.ones((drafters, len(rows), depths))
    for d in np.flatnonzero(usable):
        groups = known.groups[d]
        pool = pool_tried(groups, classes)
        of_class = class_factors(pool, groups, classes, EXPECTED_ANY)
        hit_rates = (known.offered[d] + HIT_TRIALS) / (known.asked[d] + HIT_TRIALS)
        for n in range(len(rows)):
            i = rows[n]
            factor = factor_of(of_class, pool, groups, batch.slo_class[i], batch.slot[i], EXPECTED_ANY)
            path = 1.0
            for k in range(min(limit, batch.left[i] - OF_THIS_STEP)):
                path *= with_factor(known.hazards[d, k, ANY], factor)
                paths[d, n, k] = path
            if not known.passes[d]:
                own = known.slot_hits[batch.slot[i], d]
                hits = (own[1] + SLOT_HIT_TRIALS * hit_rates[0]) / (own[0] + SLOT_HIT_TRIALS) / hit_rates[0]
                for k in range(depths):
                    offers[d, n, k] = min(1.0, hits * hit_rates[k])
    return paths, offers


@compiled
def _node_paths(
    hazards: Floats, groups: Floats, classes: int, slot: Ints, slo_class: Ints, left: Ints, request: Ints,
    parent: Ints, drafter: Ints, depth: Ints, confidence: Floats, edges: Floats,
) -> Floats:  # fmt: skip
    drafters, depths = hazards.shape[:2]
    pools, of_class = np.empty(drafters), np.empty((drafters, 2, 1 + classes))
    for d in range(drafters):
        pools[d] = pool_tried(groups[d], classes)
        for column in (EXPECTED, EXPECTED_ANY):
            of_class[d, column - EXPECTED] = class_factors(pools[d], groups[d], classes, column)
    paths, factors = np.empty(len(request)), np.zeros((drafters, len(slot), 2))
    for m in range(len(request)):
        d, i, column = drafter[m], request[m], EXPECTED_ANY if np.isnan(confidence[m]) else EXPECTED
        known = factors[d, i]
        if known[column - EXPECTED] == 0.0:
            of_classes = of_class[d, column - EXPECTED]
            known[column - EXPECTED] = factor_of(of_classes, pools[d], groups[d], slo_class[i], slot[i], column)
        hazard = hazards[d, min(depth[m], depths) - 1, bin_of(confidence[m], edges[d])]
        before = 1.0 if parent[m] == ROOT else paths[parent[m]]
        paths[m] = before * with_factor(hazard, known[column - EXPECTED]) if depth[m] < left[i] else 0.0
    return paths
