"""How likely the target accepts the next proposed token: by position, drafter, SLO class and request.

One geometric alpha is biased where acceptance falls with the position and k varies, so each position has its own
conditional probability (hazard), scaled by one factor per class and one per request that shrink to 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.batch import RequestOutcome

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Names = tuple[str | None, ...]

AGE_HALF_LIFE_S = 30.0
"""Evidence ages by time: by observation alone, k = 0 would keep its own verdict for ever."""
WARM_TRIALS = 12.0
WARM_REQUESTS = 24.0
"""Asked so often, a drafter that had hardly a proposal is no stranger either."""
EVIDENCE_CAP = 150.0
"""Most trials a position's estimate rests on, so that it follows the traffic."""
PRIOR_HAZARD = 0.6
PRIOR_TRIALS = 4.0
POSITION_TRIALS = 12.0
"""What the position before it counts for in a position's estimate: few requests reach deep positions, the easy ones
first, and a draft length that rests on four of them is a bad bet."""
CLASS_TRIALS = 30.0
REQUEST_TRIALS = 6.0
REQUEST_CAP = 60.0
RECENT_TRIALS = 24.0
ALARM_SIGMAS = 3.5
MAX_HAZARD = np.float32(0.99)


class Acceptance:
    """Discounted Beta counts. Shapes: D drafters, K positions, C classes, S request slots, N requests asked for.

    Answers are position-major, (K, N), and in single precision: they are asked for twice a step."""

    def __init__(self, drafters: Iterable[str], max_draft_tokens: int) -> None:
        self.index = {name: number for number, name in enumerate(drafters)}
        shape = (len(self.index), max(1, max_draft_tokens))
        self.accepted = np.zeros(shape)  # (D, K)
        self.tried = np.zeros(shape)  # (D, K)
        self._offered = np.zeros(shape)  # (D, K) real proposals that reached position j
        self._asked = np.zeros(shape)  # (D, K) requests that were asked for position j
        self._recent = np.zeros((shape[0], 3))  # (D, [accepted, expected, variance]) of the last trials
        self._classes = RatioTable(shape[0], CLASS_TRIALS, cap=EVIDENCE_CAP)
        self._requests = RatioTable(shape[0], REQUEST_TRIALS, cap=REQUEST_CAP)
        self._request_hits = RatioTable(shape[0], 3.0, cap=20.0)
        self._cached: tuple[tuple[Names, Names], Floats] | None = None
        self._aged_at: float | None = None
        self.alarms = 0
        self.met = np.zeros(shape[0], dtype=bool)
        """(D,): drafters that were tried often enough once to be no strangers."""
        self._refresh()

    def observe(self, outcomes: Iterable[RequestOutcome], now: float) -> None:
        """Count a step's trials. Positions after a rejection are none (`RequestOutcome.tried`)."""
        self.age(now)
        asked = [o for o in _with_misses(outcomes) if o.asked > 0 and o.drafter in self.index]
        if not asked:
            return
        for name in {o.drafter for o in asked if o.drafter is not None}:
            self._observe_drafter(self.index[name], [o for o in asked if o.drafter == name])
        self.met |= (self.tried[:, 0] >= WARM_TRIALS) | (self._asked[:, 0] >= WARM_REQUESTS)
        self._cap()
        self._alarm()
        self._refresh()

    def age(self, now: float) -> None:
        """Let evidence age, also where nothing is observed (k = 0)."""
        if self._aged_at is None:
            self._aged_at = now
        keep = 0.5 ** (max(0.0, now - self._aged_at) / AGE_HALF_LIFE_S)
        if keep > 0.99:  # often enough, and cheap
            return
        self._aged_at = now
        for counts in (self.accepted, self.tried, self._offered, self._asked, self._recent):
            counts *= keep
        for table in (self._classes, self._requests, self._request_hits):
            table.age(keep)
        self._refresh()

    def forget(self, request_id: str) -> None:
        self._cached = None
        self._requests.forget(request_id)
        self._request_hits.forget(request_id)

    def numbers(self, drafters: Sequence[str | None]) -> Ints:
        """(N,): the drafters' numbers, -1 for none and for unknown ones."""
        get = self.index.get
        return np.array([get(name, -1) for name in drafters], dtype=int)  # type: ignore[arg-type]

    def paths(self, requests: Names, classes: Names) -> tuple[Floats, Floats]:
        """Two (D, K, N): probability that the target accepts positions 1..j, given that they are proposed; and that
        the drafter has a proposal at position j (prompt lookup may find none)."""
        first, hits = self._first_odds(requests, classes), self._request_hits.ratios(requests)
        odds = self._odds32[:, :, None] * first.T[:, None]
        hazards = odds / (1 + odds)
        offers = np.minimum(self._hit_rates32[:, :, None] * hits.T[:, None], np.float32(1.0))
        return hazards.cumprod(axis=1), offers

    def paths_of(self, drafters: Ints, requests: Names, classes: Names) -> Floats:
        """(K, N): the same for the one drafter that each request's proposals came from."""
        odds = self._odds32.T[:, drafters] * self._first_odds(requests, classes)[np.arange(len(drafters)), drafters]
        odds /= 1 + odds
        return np.asarray(odds.cumprod(axis=0, out=odds))

    def _first_odds(self, requests: Names, classes: Names) -> Floats:
        """(N, D): odds of the first position, whose hazard the factors of request and class multiply. The odds of the
        others grow as its do: a product of each hazard and a factor would pass 1 just where it matters, far down."""
        if self._cached is None or self._cached[0] != (requests, classes):
            factors = self._requests.ratios(requests) * self._classes.ratios(classes)
            first = np.minimum(self._first32 * factors, MAX_HAZARD)
            self._cached = ((requests, classes), first / (1 - first))
        return self._cached[1]

    def upper_paths(self) -> Floats:
        """(D, K): optimistic paths (one posterior standard deviation), offers included, for exploration."""
        mean = self.hazards
        spread = np.sqrt(mean * (1 - mean) / (self.tried + PRIOR_TRIALS + 1))
        return np.asarray(np.cumprod(np.minimum(mean + spread, MAX_HAZARD), axis=1) * self.hit_rates)

    def _observe_drafter(self, drafter: int, outcomes: list[RequestOutcome]) -> None:
        counts = np.array([(o.asked, o.proposed, o.verified, o.accepted) for o in outcomes])  # (M, 4)
        asked, proposed, verified, accepted = np.minimum(counts, self.tried.shape[1]).T
        tried = np.minimum(verified, accepted + 1)  # (M,) RequestOutcome.tried
        ids = [o.id for o in outcomes]
        self._request_hits.add(ids, drafter, proposed > 0, np.full(len(ids), self.hit_rates[drafter, 0]))
        self._asked[drafter] += _reached(asked, self.tried.shape[1])
        self._offered[drafter] += _reached(proposed, self.tried.shape[1])
        self.tried[drafter] += _reached(tried, self.tried.shape[1])
        self.accepted[drafter] += _reached(accepted, self.tried.shape[1])
        self._add_factors(drafter, outcomes, tried, accepted)

    def _add_factors(self, drafter: int, outcomes: list[RequestOutcome], tried: Ints, accepted: Ints) -> None:
        """Observed against expected acceptances, for the drafter, its classes and its requests."""
        hazards = self.hazards[drafter]  # (K,) from before this step
        expected = np.concatenate([[0.0], np.cumsum(hazards)])[tried]  # (M,)
        variance = np.concatenate([[0.0], np.cumsum(hazards * (1 - hazards))])[tried]
        self._recent[drafter] *= (1 - 1 / RECENT_TRIALS) ** tried.sum()
        self._recent[drafter] += accepted.sum(), expected.sum(), variance.sum()
        classes = [o.slo_class for o in outcomes]
        of_class = self._classes.ratios(classes)[:, drafter]
        self._classes.add(classes, drafter, accepted, expected)
        self._requests.add([o.id for o in outcomes], drafter, accepted, expected * of_class)

    def _cap(self) -> None:
        excess = np.minimum(1.0, EVIDENCE_CAP / np.maximum(self.tried, 1e-9))
        self.tried *= excess
        self.accepted *= excess
        excess = np.minimum(1.0, EVIDENCE_CAP / np.maximum(self._asked, 1e-9))
        self._asked *= excess
        self._offered *= excess

    def _alarm(self) -> None:
        """Traffic changed: the last trials contradict the long estimate, which then counts for little."""
        accepted, expected, variance = self._recent.T
        surprise = np.abs(accepted - expected) > ALARM_SIGMAS * np.sqrt(variance + 0.5)
        for drafter in np.flatnonzero(surprise):
            ratio = float(accepted[drafter] / max(expected[drafter], 1e-9))
            hazards = np.clip(self.hazards[drafter] * ratio, 0.01, MAX_HAZARD)
            self.tried[drafter] = np.minimum(self.tried[drafter], RECENT_TRIALS / 2)
            self.accepted[drafter] = hazards * self.tried[drafter]
            self._recent[drafter] = 0
            self._classes.reset(drafter)
            self._requests.reset(drafter)
            self.alarms += 1

    def _refresh(self) -> None:
        """Posterior means; each position shrinks to the one before it, the first to the prior."""
        self._cached = None
        self.hazards = np.empty_like(self.tried)  # (D, K)
        before: Floats | float = PRIOR_HAZARD
        strength = PRIOR_TRIALS
        for position in range(self.tried.shape[1]):
            before = (self.accepted[:, position] + strength * before) / (self.tried[:, position] + strength)
            self.hazards[:, position] = before
            strength = POSITION_TRIALS
        self.hit_rates = (self._offered + 2.0) / (self._asked + 2.0)  # (D, K)
        odds = self.hazards / (1 - self.hazards)
        self._first32 = self.hazards[:, 0].astype(np.float32)  # (D,)
        self._odds32 = (odds / odds[:, :1]).astype(np.float32)  # (D, K), by those of the first position
        self._hit_rates32 = self.hit_rates.astype(np.float32)


def _with_misses(outcomes: Iterable[RequestOutcome]) -> Iterator[RequestOutcome]:
    """A drafter that stood in for another proposes beside the other's finding nothing."""
    for outcome in outcomes:
        yield outcome
        if outcome.missed is not None:
            drafter, asked = outcome.missed
            yield outcome._replace(drafter=drafter, asked=asked, proposed=0, verified=0, accepted=0, missed=None)


def _reached(lengths: Ints, positions: int) -> Ints:
    """(K,): how many of `lengths` (M,) reach position 1..K."""
    return np.asarray((lengths[:, None] > np.arange(positions)).sum(axis=0))


class RatioTable:
    """Observed over expected counts per key and drafter, shrunk to 1 by `strength` expected counts."""

    def __init__(self, drafters: int, strength: float, *, cap: float) -> None:
        self._strength = strength
        self._cap = cap
        self._slots: dict[Hashable, int] = {}
        self._free: list[int] = []
        # Row 0 stays empty: the ratio of a key that is not known is 1.
        self._counts = np.zeros((64, drafters, 2), dtype=np.float32)  # (S, D, [observed, expected])
        self._last: tuple[Sequence[Hashable], Ints] | None = None

    def ratios(self, keys: Sequence[Hashable]) -> Floats:
        """(N, D)"""
        if self._last is None or self._last[0] != keys:
            get = self._slots.get
            self._last = (keys, np.array([get(key, 0) for key in keys], dtype=int))
        counts = self._counts[self._last[1]] + self._strength  # (N, D, [observed, expected])
        return np.asarray(np.divide(counts[..., 0], counts[..., 1], dtype=np.float32))

    def add(self, keys: Sequence[Hashable], drafter: int, observed: NDArray[Any], expected: Floats) -> None:
        """observed, expected: (N,); a key may stand more than once."""
        slots = [self._slot(key) for key in keys]
        counts = self._counts[:, drafter]  # (S, 2), a view
        np.add.at(counts, slots, np.stack([observed, expected], axis=1))
        excess = np.minimum(1.0, self._cap / np.maximum(counts[slots, 1:], 1e-9))
        counts[slots] = counts[slots] * excess

    def age(self, keep: float) -> None:
        self._counts *= keep

    def reset(self, drafter: int) -> None:
        self._counts[:, drafter] = 0

    def forget(self, key: Hashable) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._counts[slot] = 0
            self._last = None
            self._free.append(slot)

    def _slot(self, key: Hashable) -> int:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._slots) + 1
            if slot >= len(self._counts):
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._slots[key] = slot
            self._last = None
        return slot
