"""Suffix drafters and prompt lookup propose what the longest earlier match was followed by."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.draft_pool import DrafterSpec, DraftMethod, PromptLookup, Suffix
from outrider_runtime.drafters import longest_match
from outrider_runtime.drafters.longest_match import Proposals, follow_matches
from outrider_runtime.drafters.suffix import AGREEMENT, BASE, MOST_MATCHES, SLOPE, MatchLengths, match_lengths
from outrider_runtime.vllm_plugin import suffix_search

LONGEST = 200


class Case(NamedTuple):
    texts: list[list[int]]
    match: MatchLengths
    most: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = st.integers(0, draw(st.sampled_from([0, 1, 4, 2**31 - 1])))
    texts = draw(st.lists(st.lists(tokens, max_size=LONGEST), min_size=1, max_size=5))
    shortest = draw(st.integers(1, 6))
    return Case(texts, MatchLengths(shortest, shortest + draw(st.integers(0, 12))), draw(st.integers(1, 6)))


def table_of(texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Texts in rows in reverse order; what is behind each is left from another request."""
    table = np.full((len(texts) + 1, LONGEST), 1, np.int32)
    rows = np.arange(len(texts))[::-1].copy()
    for row, text in zip(rows, texts, strict=True):
        table[row, : len(text)] = text
    return table, rows, np.array([len(text) for text in texts])


def naive(text: list[int], match: MatchLengths, most: int) -> tuple[list[int], list[float]]:
    """Proposed tokens and their confidences, by definition."""

    def matched(end: int) -> int:
        return next((n for n in range(match.longest) if n > end or text[end - n] != text[-1 - n]), match.longest)

    lengths = [matched(end) for end in range(len(text) - 1)]
    context = max(lengths, default=0)
    if context < match.shortest:
        return [], []
    ends = [end for end, length in enumerate(lengths) if length == context][::-1][:MOST_MATCHES]
    text, proposed, confidences = list(text), list[int](), list[float]()
    for k in range(most):
        text.append(text[ends[0] + 1 + k])
        agreeing = [end for end in ends if text[end + 1 + k] == text[-1]]
        agreement = math.log(len(agreeing) ** 2 / len(ends))
        proposed.append(text[-1])
        confidences.append(BASE + SLOPE * (math.log(context + k) + AGREEMENT * agreement))
        ends = agreeing
    return proposed, confidences


def check(made: Proposals, case: Case) -> None:
    for i, text in enumerate(case.texts):
        proposed, confidences = naive(text, case.match, case.most)
        assert made.tokens[i, : made.counts[i]].tolist() == proposed
        assert made.confidence[i, : made.counts[i]] == pytest.approx(confidences, abs=1e-4)


@given(cases())
def test_proposals_equal_those_of_a_naive_search(case: Case) -> None:
    check(follow_matches(*table_of(case.texts), case.match, case.most), case)


@given(cases(), st.sampled_from([1, 2000, 1 << 25]))
def test_search_on_a_device_equals_the_compiled_one(case: Case, compared: int) -> None:
    """Promise: what is tested on a CPU is what serves on a GPU, however many parts a large batch comes in."""
    texts, rows, lengths = (torch.from_numpy(column) for column in table_of(case.texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_search, "MOST_COMPARED", compared)
        made = suffix_search.search(texts, rows, lengths, case.match, case.most)
    check(Proposals(*(column.numpy() for column in made)), case)


def test_request_in_a_reused_row_sees_nothing_of_the_one_before() -> None:
    """Promise: no token of one request is proposed for another, though the rows are vLLM's and never cleared."""
    table, row = np.zeros((1, 64), np.int32), np.zeros(1, np.int64)
    table[0, :40] = np.tile([1, 2, 3, 4], 10)
    assert follow_matches(table, row, np.array([40]), MatchLengths(1, 16), 4).tokens.tolist() == [[1, 2, 3, 4]]
    table[0, :2] = 1, 4
    assert follow_matches(table, row, np.array([2]), MatchLengths(1, 16), 4).counts.tolist() == [0]


def test_suffix_search_takes_a_million_distinct_tokens() -> None:
    text = np.arange(1_000_000, dtype=np.int32)[None]
    lengths = np.array([text.shape[1]])
    assert follow_matches(text, np.zeros(1, np.int64), lengths, MatchLengths(1, 16), 4).counts.tolist() == [0]
    text[0, -1] = 7
    made = follow_matches(text, np.zeros(1, np.int64), lengths, MatchLengths(1, 16), 4)
    assert made.tokens.tolist() == [[8, 9, 10, 11]]


def test_text_shorter_than_a_match_is_not_searched() -> None:
    """Bug: compiled code read before the text. Python's own bounds are checked here."""
    search = longest_match._longest_matches.py_func  # type: ignore[attr-defined]
    assert search(np.arange(3, dtype=np.int32), 8, 16, np.empty(4, np.int64)) == (8, 0)


def test_prompt_lookup_is_a_suffix_drafter_with_other_lengths() -> None:
    lookup = DrafterSpec(name="a", method=DraftMethod.PROMPT_LOOKUP, prompt_lookup=PromptLookup(min_tokens=3))
    assert match_lengths(lookup) == (3, 4)
    assert match_lengths(DrafterSpec(name="b", method=DraftMethod.SUFFIX, suffix=Suffix(max_tokens=8))) == (1, 8)
