"""Answers of finished requests, from which suffix drafters of a wider scope propose.

An answer has an owner (the service, an adapter or a tenant), and a request gets proposals from answers of its own owner
only. Answers lie one after another in a ring of tokens; new ones overwrite the oldest. For each of the lengths in
`GRAMS`, places with equal last tokens and owner are chained by a hash, the latest first, as in deflate (RFC 1951). A
search follows the chain of the longest of these lengths that has a match, `MOST_STEPS` places at most.

Of the longest matches, the token that most of them have next is followed. Its confidence is that of `drafters.suffix`
with another constant.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from outrider_crds.base import seconds
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.quantity import quantity

from outrider_runtime.control.compiled import compilable, compiled
from outrider_runtime.drafters.longest_match import Proposals, confidence_of
from outrider_runtime.drafters.suffix import sharing_scope
from outrider_runtime.loop.confidences import START_INTERCEPT, START_SLOPE

NO_OWNER = -1
"""Owner of a request that shares with no other."""
GRAMS = np.array([8, 4, 2])
"""Tokens of the contexts that are indexed."""
MOST_STEPS = 48
"""Places of a chain that are compared: a search takes 10 us at most, since each may miss the cache."""
KEPT_BASE = -2.5
"""Replaces `BASE`: a match in another request's answer says less than one in the request's own text. Next to a head it
gains 1 to 5% tokens a step over `BASE`."""
NOTHING = -1
"""Stands in the ring between answers, and where nothing is kept: equal to no token."""
LARGEST_PART = 4
"""An answer takes at most one part in so many of the ring."""
BYTES_PER_TOKEN = 4 + 8 + 16 * len(GRAMS)


class KeptAnswer(NamedTuple):
    owner: int
    tokens: npt.NDArray[np.int32]
    finished_at_s: float


class Ring(NamedTuple):
    """C places; place p of all that was ever kept is at p % C."""

    tokens: npt.NDArray[np.int32]
    """(C,)"""
    owners: npt.NDArray[np.int64]
    """(C,)"""
    heads: npt.NDArray[np.int64]
    """(G, C): the latest place of each hash; -1: none."""
    links: npt.NDArray[np.int64]
    """(G, C): the place before it in its chain."""


def kept_answers(drafter: DrafterSpec) -> KeptAnswers | None:
    """Make the store of a drafter that shares answers; None for any other drafter."""
    suffix = drafter.suffix
    if suffix is None or sharing_scope([drafter]) is None:
        return None
    return KeptAnswers(int(quantity(suffix.memory) or 0), suffix.max_tokens, seconds(suffix.max_age))


class KeptAnswers:
    def __init__(self, memory_bytes: int, longest: int, max_age_s: float) -> None:
        """longest: tokens of a match at most."""
        places = 1 << max(4, int(memory_bytes // BYTES_PER_TOKEN).bit_length() - 1)
        nowhere = np.full((len(GRAMS), places), -1)
        self._ring = Ring(np.full(places, NOTHING, np.int32), np.full(places, NO_OWNER), nowhere, nowhere.copy())
        self._longest = longest
        self._max_age_s = max_age_s
        self._ends = deque[tuple[int, float]]()
        """End and time of each answer, the oldest first."""
        self._start = self._end = 0

    def update(self, answers: Iterable[KeptAnswer], now_s: float) -> None:
        """Add answers, and erase those that are too old. The oldest make room; one that is too long is left out."""
        places = len(self._ring.tokens)
        for answer in answers:
            taken = len(answer.tokens) + 1
            if taken > places // LARGEST_PART:
                continue
            while self._end + taken - self._start > places:
                self._forget_oldest()
            _insert(self._ring, self._end, answer.tokens, answer.owner)
            self._end += taken
            self._ends.append((self._end, answer.finished_at_s))
        while self._ends and self._ends[0][1] < now_s - self._max_age_s:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        end, _ = self._ends.popleft()
        places = np.arange(self._start, end) % len(self._ring.tokens)
        self._ring.tokens[places] = NOTHING
        self._start = end

    def improve(
        self, proposals: Proposals, texts: npt.NDArray[np.int32], rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64], owners: npt.NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Replace the proposals of requests for which a kept answer promises more. owners: (R,)."""
        _improve(self._ring, self._start, self._longest, texts, rows, lengths, owners, proposals)


@compilable
def _hash(tokens: npt.NDArray[np.int32], end: int, count: int, owner: int) -> np.int64:
    """Hash an owner and the `count` tokens up to `end`."""
    mixed = np.uint64(owner)
    for n in range(count):
        mixed = (mixed ^ np.uint64(tokens[end - n])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed >> np.uint64(1))


@compiled
def _insert(ring: Ring, start: int, answer: npt.NDArray[np.int32], owner: int) -> None:
    """Write an answer to the ring, and all of its places that a token follows to the chains."""
    tokens, owners, heads, links = ring
    mask = len(tokens) - 1
    for n in range(len(answer)):
        tokens[(start + n) & mask] = answer[n]
        owners[(start + n) & mask] = owner
    tokens[(start + len(answer)) & mask] = NOTHING
    for g in range(len(GRAMS)):
        for n in range(GRAMS[g] - 1, len(answer) - 1):
            bucket = _hash(answer, n, GRAMS[g], owner) & mask
            links[g, (start + n) & mask] = heads[g, bucket]
            heads[g, bucket] = start + n


@compiled
def _improve(
    ring: Ring, start: int, longest: int, texts: npt.NDArray[np.int32], rows: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64], owners: npt.NDArray[np.int64], proposals: Proposals,
) -> None:  # fmt: skip
    """start: the oldest place that is kept."""
    most = proposals.tokens.shape[1]
    ends = np.empty(MOST_STEPS, np.int64)
    tokens, confidence = np.empty(most, np.int64), np.empty(most, np.float32)
    for i in range(len(rows)):
        if owners[i] == NO_OWNER or lengths[i] == 0:
            continue
        context, matches = _longest_matches(ring, start, longest, texts[rows[i], : lengths[i]], owners[i], ends)
        count = _follow_most(ring.tokens, context, ends[:matches], tokens, confidence)
        own = _expected(proposals.confidence[i, : proposals.counts[i]])
        if _expected(confidence[:count]) > own:
            proposals.tokens[i, :count], proposals.confidence[i, :count] = tokens[:count], confidence[:count]
            proposals.counts[i] = count


@compiled
def _longest_matches(
    ring: Ring, start: int, longest: int, text: npt.NDArray[np.int32], owner: int, ends: npt.NDArray[np.int64]
) -> tuple[int, int]:  # fmt: skip
    """Return length and number of the longest matches; `ends` gets the places of their last tokens, latest first."""
    mask = len(ring.tokens) - 1
    best, matches = 0, 0
    for g in range(len(GRAMS)):
        if len(text) < GRAMS[g] or longest < GRAMS[g]:
            continue
        place = ring.heads[g, _hash(text, len(text) - 1, GRAMS[g], owner) & mask]
        best = GRAMS[g]
        for _ in range(len(ends)):
            if place < start:
                break
            at = place & mask
            if ring.owners[at] == owner:
                length = _match_length(ring.tokens, at, text, longest)
                if length > best:
                    best, matches = length, 0
                if length == best:
                    ends[matches] = place
                    matches += 1
            place = ring.links[g, at]
        if matches > 0:
            break
    return best, matches


@compilable
def _match_length(tokens: npt.NDArray[np.int32], at: int, text: npt.NDArray[np.int32], longest: int) -> int:
    """Count the tokens up to `at` that equal the last ones of the text."""
    most, length = min(longest, len(text)), 0
    while length < most and tokens[at - length] == text[len(text) - 1 - length]:  # an index below 0 wraps
        length += 1
    return length


@compiled
def _follow_most(
    kept: npt.NDArray[np.int32], context: int, ends: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64],
    confidence: npt.NDArray[np.float32],
) -> int:  # fmt: skip
    """Fill a proposal with what most matches have next, and return its length. Matches that disagree are dropped."""
    matches, mask = len(ends), len(kept) - 1
    for k in range(len(tokens)):
        token = _majority(kept, ends[:matches], k)
        if token == NOTHING:
            return k
        agreeing = 0
        for i in range(matches):
            if kept[(ends[i] + 1 + k) & mask] == token:
                ends[agreeing] = ends[i]
                agreeing += 1
        tokens[k] = token
        confidence[k] = confidence_of(KEPT_BASE, context + k, agreeing, matches)
        matches = agreeing
    return len(tokens)


@compilable
def _majority(kept: npt.NDArray[np.int32], ends: npt.NDArray[np.int64], k: int) -> int:
    """Return the token that more than half of the places have next, if there is one (Boyer and Moore), else any."""
    token, votes, mask = NOTHING, 0, len(kept) - 1
    for i in range(len(ends)):
        following = kept[(ends[i] + 1 + k) & mask]
        if votes == 0:
            token = following
        votes += 1 if following == token else -1
    return token


@compilable
def _expected(confidence: npt.NDArray[np.float32]) -> float:
    """Expected accepted tokens of a proposal, by the start values of `loop.confidences`."""
    expected, path = 0.0, 1.0
    for k in range(len(confidence)):
        path *= 1.0 / (1.0 + math.exp(-(START_SLOPE * confidence[k] + START_INTERCEPT)))
        expected += path
    return expected
