"""Suffix drafters of a wider scope propose from finished answers of the same owner, which are bounded and erased."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.draft_pool import DrafterSpec, DraftMethod, Suffix, SuffixScope
from outrider_runtime.drafters.kept_answers import (
    BYTES_PER_TOKEN,
    KEPT_BASE,
    NO_OWNER,
    KeptAnswer,
    KeptAnswers,
    kept_answers,
)
from outrider_runtime.drafters.longest_match import Proposals
from outrider_runtime.drafters.suffix import AGREEMENT, SLOPE

LONGEST, HOUR_S = 12, 3600.0
SHORTEST = 2
"""Tokens of the shortest context that is indexed."""


class Answer(NamedTuple):
    owner: int
    tokens: list[int]


def store(answers: Sequence[Answer], places: int = 1024) -> KeptAnswers:
    kept = KeptAnswers(places * BYTES_PER_TOKEN, LONGEST, HOUR_S)
    kept.update([KeptAnswer(owner, np.array(tokens, np.int32), 0.0) for owner, tokens in answers], now_s=0.0)
    return kept


def proposed(kept: KeptAnswers, text: list[int], owner: int, most: int = 4) -> tuple[list[int], list[float]]:
    """Proposal and confidences for a request without a proposal of its own."""
    made = Proposals(np.zeros((1, most), np.int64), np.zeros(1, np.int64), np.zeros((1, most), np.float32))
    texts = np.array([[*text, 1, 2, 3]], np.int32)
    kept.improve(made, texts, np.zeros(1, np.int64), np.array([len(text)]), np.array([owner]))
    count = made.counts[0]
    return made.tokens[0, :count].tolist(), made.confidence[0, :count].tolist()


def naive_matches(answers: Sequence[Answer], text: list[int], owner: int) -> tuple[int, list[list[int]]]:
    """Length of the longest matches, and what follows each of them."""
    matches = list[tuple[int, list[int]]]()
    for answer in answers:
        for end in range(1, len(answer.tokens) if answer.owner == owner else 0):
            before = answer.tokens[:end]
            most = min(LONGEST, len(before), len(text))
            length = next((n for n in range(most) if before[-1 - n] != text[-1 - n]), most)
            matches.append((length, answer.tokens[end:]))
    longest = max((length for length, _ in matches), default=0)
    return longest, [after for length, after in matches if length == longest] if longest >= SHORTEST else []


answers_of_two = st.lists(
    st.builds(Answer, st.integers(1, 2), st.lists(st.integers(0, 2), max_size=9)), max_size=5
)  # fmt: skip


@given(answers_of_two, st.lists(st.integers(0, 2), max_size=12), st.integers(1, 2))
def test_proposal_follows_the_longest_matches(answers: list[Answer], text: list[int], owner: int) -> None:
    context, follows = naive_matches(answers, text, owner)
    tokens, confidences = proposed(store(answers), text, owner)
    assert bool(tokens) <= bool(follows)
    for k, (token, confidence) in enumerate(zip(tokens, confidences, strict=True)):
        following = Counter(after[k] if k < len(after) else None for after in follows)
        most, count = following.most_common(1)[0]
        assert token == most or 2 * count <= len(follows), "what most of them have next"
        evidence = math.log(context + k) + AGREEMENT * math.log(following[token] ** 2 / len(follows))
        assert confidence == pytest.approx(KEPT_BASE + SLOPE * evidence, abs=1e-4)
        follows = [after for after in follows if k < len(after) and after[k] == token]


@given(st.lists(st.lists(st.integers(1, 3), min_size=3, max_size=3), min_size=1, max_size=40), st.integers(1, 3))
def test_request_never_gets_tokens_of_another_owner(answers: list[list[int]], owner: int) -> None:
    """Promise: owners share places of the ring and buckets of its hash (the smallest ring has 16), and no token. Each
    owner's answers end in a token of its own."""
    kept = store([Answer(1 + n % 3, [*tokens, 10 + n % 3]) for n, tokens in enumerate(answers)], places=16)
    for tokens in answers:
        assert set(proposed(kept, tokens, owner)[0]) <= {1, 2, 3, 9 + owner}
        assert proposed(kept, tokens, NO_OWNER) == ([], [])


def test_own_proposal_stays_unless_a_kept_one_promises_more() -> None:
    kept = store([Answer(0, [1, 2, 3, 4, 5, 6, 7, 8])])
    text, row = np.array([[1, 2, 3, 4, 9, 9, 9, 9]], np.int32), np.zeros(1, np.int64)
    for own, expected in ((9.0, [3, 3]), (-9.0, [5, 6])):
        made = Proposals(np.full((1, 2), 3), np.full(1, 2), np.full((1, 2), own, np.float32))
        kept.improve(made, text, row, np.array([4]), np.zeros(1, np.int64))
        assert made.tokens.tolist() == [expected]


def test_answer_is_erased_when_it_is_too_old() -> None:
    kept = store([Answer(0, [1, 2, 3, 4])])
    young = KeptAnswer(0, np.array([5, 6, 7, 8], np.int32), 1800.0)
    kept.update([young], now_s=HOUR_S)
    assert proposed(kept, [1, 2], 0)[0] == [3, 4]
    kept.update([], now_s=HOUR_S + 1)
    assert proposed(kept, [1, 2], 0)[0] == []
    assert not np.isin(kept._ring.tokens, [1, 2, 3, 4]).any(), "nor is it in the memory"
    assert proposed(kept, [5, 6], 0)[0] == [7, 8]


def test_new_answers_take_the_room_of_the_oldest() -> None:
    """Promise: the memory is taken once, however many answers come; those that are left are still found."""
    kept = store([], places=64)
    for number in range(1000):
        tokens = np.array([number, number + 1, number + 2, number + 3, number + 4], np.int32)
        kept.update([KeptAnswer(number, tokens, 0.0)], now_s=0.0)
    assert len(kept._ring.tokens) == 64
    served = [bool(proposed(kept, [number, number + 1], number)[0]) for number in range(1000)]
    assert served == [False] * 990 + [True] * 10


def test_answer_that_would_fill_the_memory_is_left_out() -> None:
    kept = store([Answer(0, [1, 2, 3]), Answer(0, list(range(20, 60)))], places=64)
    assert proposed(kept, [1, 2], 0)[0] == [3]
    assert proposed(kept, [20, 21], 0)[0] == []


def test_only_a_wider_scope_keeps_answers() -> None:
    def of(scope: SuffixScope) -> KeptAnswers | None:
        return kept_answers(DrafterSpec(name="s", method=DraftMethod.SUFFIX, suffix=Suffix(scope=scope, memory="1Mi")))

    assert of(SuffixScope.REQUEST) is None
    for scope in (SuffixScope.ADAPTER, SuffixScope.TENANT, SuffixScope.SERVICE):
        kept = of(scope)
        assert kept is not None
        assert sum(column.nbytes for column in kept._ring) <= 1 << 20
