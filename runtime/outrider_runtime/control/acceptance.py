"""How likely the target accepts a proposed token, given that it accepted the one before.

By drafter, depth and bin of the drafter's own confidence (AdaServe section 4.2; the bins calibrate it), times one
factor each for the coverage of the drafter's cache, the request's class and the request. One geometric alpha is biased
where acceptance falls with depth and k varies. All factors multiply odds, so nothing passes 1, and are shrunk to 1.

Shapes: D drafters, K depths, N requests, M nodes, B bins, G groups (coverages, classes, slots).
"""

from __future__ import annotations

import numpy as np

from outrider_runtime.control.batch import NOBODY, Batch, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.forest import ROOT, Forest
from outrider_runtime.control.settings import Settings

BINS = 8
ANY = BINS
"""Column of all bins together: what is known before there is a confidence."""
AGE_HALF_LIFE_S = 30.0
"""Evidence ages by time: by observation alone, k = 0 would keep its own verdict for ever."""
LEAST_AGEING = 0.99
PRIOR, PRIOR_TRIALS = 0.6, 4.0
DEPTH_TRIALS = 12.0
"""What the depth before it counts for in a depth's estimate: few requests reach deep positions, the easy ones first."""
BIN_TRIALS = 6.0
COVERAGE_TRIALS, CLASS_TRIALS, SLOT_TRIALS = 20.0, 30.0, 6.0
MOST_TRIALS, MOST_SLOT_TRIALS = 150.0, 60.0
"""Most trials an estimate rests on, so that it follows the traffic."""
RECENT_TRIALS, ALARM_SIGMAS = 24.0, 3.5
MET_TRIALS, MET_ASKED = 12.0, 24.0
"""Tried, or asked, so often, a drafter is no stranger."""
HIT_TRIALS, SLOT_HIT_TRIALS, MOST_SLOT_HITS = 2.0, 3.0, 20.0
COVERAGES = 4
READ_SHARE, WHOLE_TOKENS = 0.5, 32
"""Share of the prompt, and tokens since the last hole, from which a head's cache counts as read and as whole."""
LEAST, MOST = 0.01, 0.99
OF_THIS_STEP = 2
"""Tokens that a request gets in any case before one of its proposals counts: this step's, and the bonus token."""
TRIED, ACCEPTED, EXPECTED, EXPECTED_ANY, EVERY = range(5)
"""Of a group: trials, acceptances, and the acceptances that the pool's estimate expects, with and without regard to
confidence, all four of the last trials only; and all trials."""


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
        self._groups = np.zeros((0, drafters, EVERY + 1))
        self.set_classes(len(settings.hot.slo_classes))
        self.met = np.zeros(drafters, dtype=bool)
        """(D,): drafters that were tried often enough once to be no strangers."""
        self.alarms = 0
        """How often the last trials contradicted the estimate: the traffic has changed."""
        self._aged_at: float | None = None
        _refresh(self._tried, self._accepted, self.hazards)

    def set_classes(self, classes: int) -> None:
        """The classes have changed: what was known of them goes, of everything else it stays."""
        old = self._groups[COVERAGES + self._classes + 1 :]
        self._classes = classes
        self._groups = np.zeros((COVERAGES + classes + 1 + self._slots, len(self.hazards), EVERY + 1))
        self._groups[COVERAGES + classes + 1 :][: len(old)] = old

    def age(self, now: float) -> None:
        """Let evidence age, also where nothing is observed (k = 0)."""
        if self._aged_at is None:
            self._aged_at = now
        keep = 0.5 ** (max(0.0, now - self._aged_at) / AGE_HALF_LIFE_S)
        if keep > LEAST_AGEING:
            return
        self._aged_at = now
        for counts in (self._tried, self._accepted, self._asked, self._offered, self._slot_hits, self._recent):
            counts *= keep
        self._groups *= keep
        _refresh(self._tried, self._accepted, self.hazards)

    def release(self, slots: Ints) -> None:
        """These requests have ended; whoever comes into their slots is a stranger."""
        self._groups[COVERAGES + self._classes + 1 + slots] = 0.0
        self._slot_hits[slots] = 0.0

    def observe(self, batch: Batch, forest: Forest, verified: Bools, accepted: Bools) -> None:
        """Count a step's trials: verified nodes whose parent was accepted. verified, accepted: (M,)."""
        _count_hits(
            forest.asked, forest.lengths, forest.request, forest.drafter, forest.depth, batch.slot,
            self._asked, self._offered, self._slot_hits,
        )  # fmt: skip
        self.alarms += _count_trials(
            forest.request, forest.parent, forest.drafter, forest.depth, self._bins(forest), verified, accepted,
            *self._of_requests(batch), self._tried, self._accepted, self.hazards, self._groups, self._recent,
        )  # fmt: skip
        _meet(self._tried, self._asked, self.met)

    def paths(self, batch: Batch, rows: Ints, usable: Bools, limit: int) -> tuple[Floats, Floats]:
        """Two (D, N, K) for N `rows` of the batch: the probability that the target accepts a chain of 1..K, if it is
        proposed, and that the drafter has a proposal of that depth. A path is 0 past `limit` positions, past what the
        request can still use, and where the drafter is not `usable` (D,)."""
        return _paths(
            self.hazards, self._groups, *self._of_requests(batch), batch.left, rows, usable, limit,
            self._asked, self._offered, self._slot_hits, self._passes,
        )  # fmt: skip

    def node_paths(self, batch: Batch, forest: Forest) -> Floats:
        """(M,): the probability that the target accepts each node and all that it hangs on; 0 for one that the request
        has no token left for."""
        return _node_paths(
            self.hazards, self._groups, *self._of_requests(batch), batch.left,
            forest.request, forest.parent, forest.drafter, forest.depth, self._bins(forest),
        )  # fmt: skip

    def worth_of_reading(self, drafter: int, length: int) -> tuple[float, float]:
        """Tokens a step that a read prompt brings a request whose drafter proposes `length`, and the trials of the kind
        of request, read or not, that has fewer."""
        return _worth_of_reading(self.hazards[drafter], self._groups, drafter, length)

    def upper_paths(self) -> Floats:
        """(D, K): paths that are optimistic by one posterior standard deviation, offers included, for exploration."""
        mean = self.hazards[:, :, ANY]
        spread = np.sqrt(mean * (1 - mean) / (self._tried[:, :, ANY] + PRIOR_TRIALS + 1))
        return np.asarray(np.minimum(mean + spread, MOST).cumprod(axis=1) * self.hit_rates)

    @property
    def hit_rates(self) -> Floats:
        """(D, K): how often a drafter that is asked for so many tokens has them."""
        return np.asarray((self._offered + HIT_TRIALS) / (self._asked + HIT_TRIALS))

    def _bins(self, forest: Forest) -> Ints:
        return _bin_confidences(forest.confidence, forest.drafter, self._edges)

    def _of_requests(self, batch: Batch) -> tuple[int, Ints, Ints, Floats, Ints, Ints]:
        """What a request's factors hang on: the classes there are, its slot, its class, and its caches."""
        whole, read = np.ascontiguousarray(batch.whole), np.ascontiguousarray(batch.read)
        return self._classes, batch.slot, batch.slo_class, read, whole, batch.context


@compiled
def _coverage(read: float, whole: int, context: int) -> int:
    """0 for a cache that has all, else what it lacks."""
    lacks_prompt, has_hole = read < READ_SHARE, whole < min(WHOLE_TOKENS, context)
    return int(lacks_prompt) + 2 * int(has_hole)


@compiled
def _meet(tried: Floats, asked: Floats, met: Bools) -> None:
    for d in range(len(met)):
        met[d] |= tried[d, 0, ANY] >= MET_TRIALS or asked[d, 0] >= MET_ASKED


@compiled
def _worth_of_reading(hazards: Floats, groups: Floats, drafter: int, length: int) -> tuple[float, float]:
    pool, gain = _pool_tried(groups, drafter), 0.0
    for coverage in range(2):
        group = groups[coverage, drafter]
        factor = _ratio(pool, group, group[EXPECTED_ANY], COVERAGE_TRIALS)
        path = 1.0
        for k in range(length):
            path *= _with_factor(hazards[k, ANY], factor)
            gain += path if coverage == 0 else -path
    return gain, min(groups[0, drafter, EVERY], groups[1, drafter, EVERY])


@compiled
def _bin_confidences(confidence: Floats, drafter: Ints, edges: Floats) -> Ints:
    bins = np.empty(len(confidence), np.int64)
    for m in range(len(confidence)):
        bins[m] = ANY if np.isnan(confidence[m]) else np.searchsorted(edges[drafter[m]], confidence[m])
    return bins


@compiled
def _ratio(pool_tried: float, group: Floats, expected: float, strength: float) -> float:
    """By what the odds of a group differ from the pool's. The group's share of the pool is evidence that has counted
    already: its own mean is shrunk to that of the others, and of a lone request's evidence nothing is left."""
    tried = group[TRIED]
    if tried <= 0.0:
        return 1.0
    share = min(0.999, group[EVERY] / max(pool_tried, 1e-9))
    mean = min(max(expected / tried, LEAST), MOST)
    weight = max(0.0, tried - strength * share / (1.0 - share)) / (tried + strength)
    own = min(max(mean + weight * (group[ACCEPTED] / tried - mean), LEAST), MOST)
    return float(own / (1.0 - own) * (1.0 - mean) / mean)


@compiled
def _factor(
    pool_tried: float, groups: Floats, classes: int, drafter: int, slot: int, slo_class: int, coverage: int, column: int
) -> float:  # fmt: skip
    """The product of the three factors on a request's odds."""
    own = groups[COVERAGES + classes + 1 + slot, drafter]
    of_class = groups[COVERAGES + min(slo_class, classes - 1) + 1, drafter]
    covered = groups[coverage, drafter]
    factor = _ratio(pool_tried, covered, covered[column], COVERAGE_TRIALS)
    factor *= _ratio(pool_tried, of_class, of_class[column], CLASS_TRIALS)
    return float(factor * _ratio(pool_tried, own, own[column], SLOT_TRIALS))


@compiled
def _with_factor(hazard: float, factor: float) -> float:
    odds = hazard / (1.0 - hazard) * factor
    return float(min(odds / (1.0 + odds), MOST))


@compiled
def _pool_tried(groups: Floats, drafter: int) -> float:
    """Trials of all coverages: each trial has one."""
    total = 0.0
    for coverage in range(COVERAGES):
        total += groups[coverage, drafter, EVERY]
    return total


@compiled
def _paths(
    hazards: Floats, groups: Floats, classes: int, slot: Ints, slo_class: Ints, read: Floats, whole: Ints,
    context: Ints, left: Ints, rows: Ints, usable: Bools, limit: int, asked: Floats, offered: Floats,
    slot_hits: Floats, has_passes: Bools,
) -> tuple[Floats, Floats]:  # fmt: skip
    drafters, depths = hazards.shape[:2]
    paths = np.empty((drafters, len(rows), depths))
    offers = np.ones((drafters, len(rows), depths))
    for d in range(drafters):
        pool = _pool_tried(groups, d)
        for n in range(len(rows)):
            i = rows[n]
            coverage = _coverage(read[d, i], whole[d, i], context[i])
            factor = _factor(pool, groups, classes, d, slot[i], slo_class[i], coverage, EXPECTED_ANY)
            path, hits = 1.0, 1.0
            if not has_passes[d]:
                rate = (offered[d, 0] + HIT_TRIALS) / (asked[d, 0] + HIT_TRIALS)
                own = slot_hits[slot[i], d]
                hits = (own[1] + SLOT_HIT_TRIALS * rate) / (own[0] + SLOT_HIT_TRIALS) / rate
            for k in range(depths):
                path *= _with_factor(hazards[d, k, ANY], factor)
                paths[d, n, k] = path if usable[d] and k < min(limit, left[i] - OF_THIS_STEP) else 0.0
                if not has_passes[d]:
                    offers[d, n, k] = min(1.0, hits * (offered[d, k] + HIT_TRIALS) / (asked[d, k] + HIT_TRIALS))
    return paths, offers


@compiled
def _node_paths(
    hazards: Floats, groups: Floats, classes: int, slot: Ints, slo_class: Ints, read: Floats, whole: Ints,
    context: Ints, left: Ints, request: Ints, parent: Ints, drafter: Ints, depth: Ints, bins: Ints,
) -> Floats:  # fmt: skip
    paths = np.empty(len(request))
    factors = np.zeros((hazards.shape[0], len(slot), 2))
    for m in range(len(request)):
        d, i, column = drafter[m], request[m], EXPECTED_ANY if bins[m] == ANY else EXPECTED
        if factors[d, i, column - EXPECTED] == 0.0:
            pool, coverage = _pool_tried(groups, d), _coverage(read[d, i], whole[d, i], context[i])
            factors[d, i, column - EXPECTED] = _factor(
                pool, groups, classes, d, slot[i], slo_class[i], coverage, column
            )
        hazard = hazards[d, min(depth[m], hazards.shape[1]) - 1, bins[m]]
        before = 1.0 if parent[m] == ROOT else paths[parent[m]]
        chance = _with_factor(hazard, factors[d, i, column - EXPECTED])
        paths[m] = before * chance if depth[m] < left[i] else 0.0
    return paths


@compiled
def _count_hits(
    asked_of: Ints, lengths: Ints, request: Ints, drafter: Ints, depth: Ints, slot: Ints,
    asked: Floats, offered: Floats, slot_hits: Floats,
) -> None:  # fmt: skip
    deepest = np.zeros((asked.shape[0], len(slot)), np.int64)
    for m in range(len(request)):
        deepest[drafter[m], request[m]] = max(deepest[drafter[m], request[m]], depth[m])
    for i in range(len(slot)):
        for rank in range(asked_of.shape[0]):
            d = asked_of[rank, i]
            if d == NOBODY:
                break
            found = min(deepest[d, i], asked.shape[1])
            asked[d, : min(max(lengths[d], found), asked.shape[1])] += 1.0
            offered[d, :found] += 1.0
            own = slot_hits[slot[i], d]
            own *= min(1.0, MOST_SLOT_HITS / (own[0] + 1.0))
            own[0] += 1.0
            own[1] += found > 0
            if found > 0:
                break
    for d in range(asked.shape[0]):
        for k in range(asked.shape[1]):
            keep = min(1.0, MOST_TRIALS / max(asked[d, k], 1e-9))
            asked[d, k] *= keep
            offered[d, k] *= keep


@compiled
def _count_trials(
    request: Ints, parent: Ints, drafter: Ints, depth: Ints, bins: Ints, verified: Bools, accepted: Bools,
    classes: int, slot: Ints, slo_class: Ints, read: Floats, whole: Ints, context: Ints,
    tried: Floats, successes: Floats, hazards: Floats, groups: Floats, recent: Floats,
) -> int:  # fmt: skip
    """Returns how many drafters' last trials contradict their estimates."""
    depths, before = hazards.shape[1], hazards.copy()
    for m in range(len(request)):
        if not verified[m] or (parent[m] != ROOT and not accepted[parent[m]]):
            continue
        d, k = drafter[m], min(depth[m], depths) - 1
        _surprise(recent[d], before[d, k, bins[m]], accepted[m])
        tried[d, k, ANY] += 1.0
        successes[d, k, ANY] += accepted[m]
        if bins[m] != ANY:
            tried[d, k, bins[m]] += 1.0
            successes[d, k, bins[m]] += accepted[m]
    _limit(tried, successes)
    alarms = 0
    for d in range(hazards.shape[0]):
        if abs(recent[d, 0] - recent[d, 1]) > ALARM_SIGMAS * np.sqrt(recent[d, 2] + 0.5):
            _start_anew(tried[d], successes[d], hazards[d], groups[:, d], recent[d])
            alarms += 1
    _refresh(tried, successes, hazards)
    for m in range(len(request)):
        if not verified[m] or (parent[m] != ROOT and not accepted[parent[m]]):
            continue
        d, i, k = drafter[m], request[m], min(depth[m], depths) - 1
        pool, chances = _pool_tried(groups, d), hazards[d, k]
        binned, blind = chances[bins[m]], chances[ANY]
        coverage = _coverage(read[d, i], whole[d, i], context[i])
        rows = (coverage, COVERAGES + min(slo_class[i], classes - 1) + 1, COVERAGES + classes + 1 + slot[i])
        strengths = (COVERAGE_TRIALS, CLASS_TRIALS, SLOT_TRIALS)
        for j in range(3):  # each factor explains what those before it leave
            group = groups[rows[j], d]
            group[:EVERY] *= min(1.0, (MOST_TRIALS if j < 2 else MOST_SLOT_TRIALS) / (group[TRIED] + 1.0))
            by_bin = _ratio(pool, group, group[EXPECTED], strengths[j])
            by_any = _ratio(pool, group, group[EXPECTED_ANY], strengths[j])
            group[TRIED] += 1.0
            group[ACCEPTED] += accepted[m]
            group[EXPECTED] += binned
            group[EXPECTED_ANY] += blind
            group[EVERY] += 1.0
            binned, blind = _with_factor(binned, by_bin), _with_factor(blind, by_any)
    return alarms


@compiled
def _surprise(recent: Floats, expected: float, accepted: bool) -> None:
    recent *= 1.0 - 1.0 / RECENT_TRIALS
    recent[0] += accepted
    recent[1] += expected
    recent[2] += expected * (1.0 - expected)


@compiled
def _limit(tried: Floats, successes: Floats) -> None:
    for d in range(tried.shape[0]):
        for k in range(tried.shape[1]):
            for b in range(tried.shape[2]):
                if tried[d, k, b] > MOST_TRIALS:
                    successes[d, k, b] *= MOST_TRIALS / tried[d, k, b]
                    tried[d, k, b] = MOST_TRIALS


@compiled
def _start_anew(tried: Floats, successes: Floats, hazards: Floats, groups: Floats, recent: Floats) -> None:
    """The last trials become what is known, and it counts for little. All arrays are one drafter's."""
    ratio = recent[0] / max(recent[1], 1e-9)
    for k in range(tried.shape[0]):
        for b in range(tried.shape[1]):
            tried[k, b] = min(tried[k, b], RECENT_TRIALS / 2)
            successes[k, b] = min(max(hazards[k, b] * ratio, LEAST), MOST) * tried[k, b]
    groups[:] = 0.0
    recent[:] = 0.0


@compiled
def _refresh(tried: Floats, successes: Floats, hazards: Floats) -> None:
    """Posterior means: each depth shrinks to the one before it, the first to the prior; each bin to its depth."""
    for d in range(tried.shape[0]):
        mean, strength = PRIOR, PRIOR_TRIALS
        for k in range(tried.shape[1]):
            mean = (successes[d, k, ANY] + strength * mean) / (tried[d, k, ANY] + strength)
            hazards[d, k, ANY] = mean
            strength = DEPTH_TRIALS
            for b in range(BINS):
                own = (successes[d, k, b] + BIN_TRIALS * mean) / (tried[d, k, b] + BIN_TRIALS)
                hazards[d, k, b] = min(max(own, LEAST), MOST)
