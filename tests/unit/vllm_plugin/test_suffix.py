"""Suffix decoding in the worker: the library's trees, fed when the drafter is asked."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_crds.spec import Suffix
from outrider_runtime.vllm_plugin.model_free import History
from outrider_runtime.vllm_plugin.suffix import MOST_WAITING_ANSWERS, SuffixHost, library_obstacle

MODEL_LEN = 512
SONG = [11, 12, 13, 14, 15, 16, 17, 18]

with_library = pytest.mark.skipif(bool(library_obstacle()), reason=library_obstacle())


def host(**settings: int) -> SuffixHost:
    return SuffixHost(Suffix(**settings), MODEL_LEN)


def history(prompt: list[int], answer: list[int], request: str = "a") -> History:
    return History(request, np.array(prompt + answer, dtype=np.int32), len(prompt))


def test_a_missing_library_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: whoever reads the drafter's reason knows what to install."""
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    assert "arctic-inference" in library_obstacle()
    assert "pip install 'outrider[suffix]'" in library_obstacle()


@with_library
def test_what_followed_before_is_proposed() -> None:
    assert host().propose(history([*SONG, 5, 6], SONG[:4]), 3) == SONG[4:7]


@with_library
def test_no_more_is_proposed_than_was_asked_for_or_fits_into_the_model() -> None:
    """Bug: a proposal past the longest request has no place in the KV cache."""
    assert len(host().propose(history(SONG * 4, SONG[:4]), 2)) == 2
    nearly_full = SONG * ((MODEL_LEN - 2) // len(SONG)) + SONG[: (MODEL_LEN - 2) % len(SONG)]
    assert len(host().propose(history(nearly_full, []), 3)) == 1
    assert host().propose(history([*nearly_full, 1], []), 3) == []


@with_library
def test_an_answer_is_proposed_to_later_requests_whoever_drafted_it() -> None:
    """Promise: the cache sees every request, also those that the drafter was never asked for, or not to the end."""
    for asked_at in (None, 0, 3):
        suffix = host()
        if asked_at is not None:
            suffix.propose(history([1, 2], SONG[:asked_at], "first"), 3)
        suffix.finished("first", SONG)
        suffix.propose(history([7, 8], [], "between"), 3)  # takes the answer in
        assert suffix.propose(history([3, 4], SONG[:4], "second"), 3) == SONG[4:7]


@with_library
def test_a_cache_of_no_requests_shows_nobody_the_answers_of_others() -> None:
    """Promise: `maxCachedRequests: 0` keeps to the request's own prompt and answer."""
    suffix = host(max_cached_requests=0)
    for name in ("first", "other"):
        suffix.propose(history([1, 2], [], name), 3)
        suffix.finished(name, SONG)
    suffix.finished("never asked", SONG)
    assert suffix.propose(history([3, 4], SONG[:4], "second"), 3) == []
    assert suffix.propose(history([*SONG, 3, 4], SONG[:4], "third"), 3) == SONG[4:7]


@with_library
def test_a_name_that_comes_again_is_another_request() -> None:
    """Clients may choose the ids of their requests."""
    suffix = host()
    suffix.propose(history(SONG, [], "a"), 3)
    suffix.finished("a", [1, 2, 3])
    assert suffix.propose(history([9, 9, 21, 22, 23, 24, 5], [21, 22], "a"), 2) == [23, 24]


@with_library
def test_waiting_answers_are_bounded() -> None:
    """Bug: a drafter that is never asked would keep every answer of the pod's life."""
    suffix = host()
    for number in range(3 * MOST_WAITING_ANSWERS):
        suffix.finished(str(number), SONG)
    assert len(suffix._waiting) == MOST_WAITING_ANSWERS


@with_library
@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    steps=st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.booleans()), max_size=12),
)
def test_proposals_do_not_depend_on_when_the_drafter_was_asked_before(prompt, steps) -> None:
    """The difference is fed lazily: a host that was asked at every step and one that was asked at some agree."""
    always, sometimes = host(), host()
    answer: list[int] = []
    for tokens, asked in steps:
        answer += tokens
        always.propose(history(prompt, answer), 3)
        if asked:
            sometimes.propose(history(prompt, answer), 3)
    assert always.propose(history(prompt, answer), 3) == sometimes.propose(history(prompt, answer), 3)
