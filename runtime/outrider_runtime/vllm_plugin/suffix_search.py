"""The search of `drafters.suffix` as operations of a device, without waiting for it.

Shapes: R requests, L tokens of the longest text, M tokens of the longest match, K tokens of a proposal at most.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from outrider_runtime.drafters.suffix import AGREEMENT, BASE, MOST_MATCHES, SLOPE, MatchLengths

MOST_COMPARED = 1 << 25
"""Tokens that are compared at once, a byte each: rows of a large batch with long texts come one part after another."""
NO_TOKEN, NO_TEXT = -1, -2
"""Fill what is before the beginning of a text, and of its last tokens: equal to no token, nor to each other."""


def search(
    texts: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, match: MatchLengths, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the columns of `Proposals` for texts (S, L), rows (R,) and lengths (R,), as `follow_matches` does."""
    part = max(1, MOST_COMPARED // (texts.shape[1] * max(match.longest, most)))
    parts = [
        _search(texts[some], some_lengths, match, most)
        for some, some_lengths in zip(torch.split(rows, part), torch.split(lengths, part), strict=True)
    ]
    tokens, counts, confidence = (torch.cat(column) for column in zip(*parts, strict=True))
    return tokens, counts, confidence


def _search(
    texts: torch.Tensor, lengths: torch.Tensor, match: MatchLengths, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """texts: (R, L), one for each request."""
    place = torch.arange(texts.shape[1], device=texts.device)
    last = lengths[:, None] - 1  # (R, 1)
    matched = torch.where(place < last, _match_lengths(texts, lengths, match.longest), 0)
    context = matched.amax(dim=1)  # (R,)
    ends = (matched == context[:, None]) & (context >= match.shortest)[:, None]  # (R, L)
    ends &= ends.flip(1).cumsum(dim=1, dtype=torch.int32).flip(1) <= MOST_MATCHES
    latest = torch.where(ends, place, -1).amax(dim=1, keepdim=True)  # (R, 1)
    ahead = torch.arange(most, device=texts.device)
    followed = latest + 1 + ahead % (last - latest).clamp(min=1)
    tokens = texts.gather(1, followed.clamp(0, texts.shape[1] - 1))  # (R, K)
    agreeing = _agreeing(texts, lengths, ends, tokens)  # (R, K)
    matches = torch.cat((ends.sum(dim=1, keepdim=True), agreeing[:, :-1]), dim=1)
    agreement = 2 * agreeing.log() - matches.log()
    confidence = BASE + SLOPE * ((context[:, None] + ahead).log() + AGREEMENT * agreement)
    counts = torch.where(latest[:, 0] >= 0, most, 0)
    return tokens.long(), counts, torch.where(counts[:, None] > 0, confidence, 0.0)


def _match_lengths(texts: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """(R, L) int8: tokens up to each position that equal the last ones of the text, `longest` at most."""
    at = lengths[:, None] - 1 - torch.arange(longest, device=texts.device)  # (R, M), last token first
    tail = torch.where(at >= 0, texts.gather(1, at.clamp(0, texts.shape[1] - 1)), NO_TEXT)
    before = pad(texts, (longest - 1, 0), value=NO_TOKEN).unfold(1, longest, 1)  # (R, L, M)
    equal = (before == tail.flip(1)[:, None]).flip(2)
    return equal.to(torch.int8).cumprod(dim=2, dtype=torch.int8).sum(dim=2, dtype=torch.int8)


def _agreeing(texts: torch.Tensor, lengths: torch.Tensor, ends: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(R, K): matches that are followed by the proposal's tokens up to each; the proposal continues the text."""
    most = tokens.shape[1]
    places = lengths[:, None] + torch.arange(most, device=texts.device)
    followed = pad(texts, (0, most)).scatter(1, places, tokens)[:, 1:].unfold(1, most, 1)  # (R, L, K)
    agrees = ends[:, :, None] & (followed == tokens[:, None])
    return agrees.to(torch.int8).cumprod(dim=2, dtype=torch.int8).sum(dim=1, dtype=torch.int32)
