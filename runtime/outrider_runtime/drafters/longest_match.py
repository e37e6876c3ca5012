"""The compiled search of suffix drafters, on the host."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider_runtime.control.compiled import compilable, compiled
from outrider_runtime.drafters.suffix import AGREEMENT, BASE, MOST_MATCHES, SLOPE, MatchLengths

CHUNK = 64
"""Tokens that are searched for the last token at once, by vector instructions."""


class Proposals(NamedTuple):
    """Proposals of R requests, K tokens each at most."""

    tokens: npt.NDArray[np.int64]
    """(R, K)"""
    counts: npt.NDArray[np.int64]
    """(R,): valid tokens at the start of a row."""
    confidence: npt.NDArray[np.float32]
    """(R, K)"""


def follow_matches(
    texts: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], match: MatchLengths,
    most: int,
) -> Proposals:  # fmt: skip
    """Propose up to `most` tokens for each request.

    texts: (S, L), a text in each row. rows: (R,), the requests' rows. lengths: (R,), tokens of their texts.
    """
    shape = len(rows), most
    proposals = Proposals(np.zeros(shape, np.int64), np.zeros(len(rows), np.int64), np.zeros(shape, np.float32))
    _follow(texts, rows, lengths, match, proposals)
    return proposals


@compiled
def _follow(
    texts: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], match: MatchLengths,
    proposals: Proposals,
) -> None:  # fmt: skip
    """Fill `proposals`."""
    tokens, counts, confidence = proposals
    ends = np.empty(MOST_MATCHES, np.int64)
    for i in range(len(rows)):
        length = lengths[i]
        text = texts[rows[i], :length]
        context, matches = _longest_matches(text, match.shortest, match.longest, ends)
        if matches > 0:
            counts[i] = tokens.shape[1]
            _follow_latest(text, context, ends[:matches], tokens[i], confidence[i])


@compiled
def _longest_matches(
    text: npt.NDArray[np.int32], shortest: int, longest: int, ends: npt.NDArray[np.int64]
) -> tuple[int, int]:  # fmt: skip
    """Return length and number of the longest matches; `ends` gets the positions of their last tokens, latest first."""
    last = len(text) - 1
    best, matches = shortest, 0
    if last < shortest:  # no earlier match fits
        return best, matches
    for stop in range(last, 0, -CHUNK):
        reach = best - 1
        start = max(reach, stop - CHUNK)
        if not _has_pair(text[start:stop], text[last], text[start - reach : stop - reach], text[last - reach]):
            continue
        for at in range(stop - 1, start - 1, -1):
            if text[at] != text[last] or text[at - reach] != text[last - reach]:
                continue
            length = _match_length(text, at, longest)
            if length > best:
                best, matches = length, 0
            if length == best and matches < len(ends):
                ends[matches] = at
                matches += 1
        if best == longest and matches == len(ends):
            break
    return best, matches


@compiled
def _has_pair(lasts: npt.NDArray[np.int32], last: int, firsts: npt.NDArray[np.int32], first: int) -> bool:
    """Whether `last` and `first` occur at one position. It has no early end, so that it compiles to vector code."""
    there = False
    for i in range(len(lasts)):
        there |= (lasts[i] == last) & (firsts[i] == first)
    return there


@compilable
def _match_length(text: npt.NDArray[np.int32], at: int, longest: int) -> int:
    """Count the tokens up to `at` that equal the last ones of the text."""
    last, length = len(text) - 1, 1
    while length < longest and length <= at and text[at - length] == text[last - length]:
        length += 1
    return length


@compiled
def _follow_latest(
    text: npt.NDArray[np.int32], context: int, ends: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64],
    confidence: npt.NDArray[np.float32],
) -> None:  # fmt: skip
    """Fill a request's proposal. ends: see `_longest_matches`; those that disagree are dropped from it."""
    latest, matches = ends[0], len(ends)
    period = len(text) - 1 - latest
    for k in range(len(tokens)):
        tokens[k] = text[latest + 1 + k % period]
        agreeing = 0
        for i in range(matches):
            at = ends[i] + 1 + k
            if (text[at] if at < len(text) else tokens[at - len(text)]) == tokens[k]:
                ends[agreeing] = ends[i]
                agreeing += 1
        confidence[k] = confidence_of(BASE, context + k, agreeing, matches)
        matches = agreeing


@compilable
def confidence_of(base: float, context: int, agreeing: int, matches: int) -> float:
    """The equation of `drafters.suffix`, for one token. base: confidence after one match of one token."""
    agreement = 2 * math.log(agreeing) - math.log(matches)
    return base + SLOPE * (math.log(context) + AGREEMENT * agreement)
