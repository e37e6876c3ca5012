"""How an answer goes on: what is accepted, where it ends, and what goes out."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
from hypothesis import given
from outrider_runtime.torch_engine.commit import Finish, commit, walk
from outrider_runtime.torch_engine.requests import Request, Sampling, Stops

from tests.unit.torch_engine.engines import Letters

LONGEST = 1000


def letters(text: str) -> list[int]:
    return [ord(letter) - 33 for letter in text]


def request(max_tokens: int = 100, strings: Iterable[str] = (), **stops: frozenset[int]) -> Request:
    return Request("r", [1], 1, Stops(max_tokens, strings=tuple(strings), **stops), Sampling(), Letters())


def test_proposals_hold_as_far_as_the_target_draws_them() -> None:
    assert walk([5, 6, 7], [5, 6, 8, 9]) == [5, 6, 8]
    assert walk([5, 6], [5, 6, 7]) == [5, 6, 7]
    assert walk([5], [4, 7]) == [4]
    assert walk([], [4]) == [4]


@given(
    text=st.text("abc", max_size=12), strings=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    parts=st.lists(st.integers(1, 4), min_size=12, max_size=12), max_tokens=st.integers(1, 12),
)  # fmt: skip
def test_an_answer_does_not_hang_on_how_it_is_cut_into_steps(
    text: str, strings: list[str], parts: list[int], max_tokens: int
) -> None:
    """Several tokens a step or one: the same tokens, the same text, the same end; nothing of a stop string goes out."""
    ends = [text.find(one) + len(one) for one in strings if one in text]
    last = min([*ends, max_tokens, len(text)])
    stopped = [one for one in strings if text[:last].endswith(one)]
    wanted = min([text.find(one) for one in stopped], default=last)
    one, told, taken, finish, rest = request(max_tokens, strings), "", 0, None, text
    for part in parts:
        if finish is not None or not rest:
            break
        done = commit(one, letters(rest[:part]), LONGEST)
        told, taken, finish, rest = told + done.text, taken + len(done.tokens), done.finish, rest[part:]
        assert not any(string in told for string in strings)
    assert taken == last
    assert one.tokens[1:] == letters(text[:last])
    if finish is None:
        assert text[:last].startswith(told)
    else:
        assert told == text[:wanted]
        assert finish is (Finish.STOP if stopped else Finish.LENGTH)


def test_tokens_behind_an_end_are_nobodys() -> None:
    one = request(end_tokens=frozenset({0}))
    done = commit(one, [7, 0, 8, 9], LONGEST)
    assert (done.tokens, done.text, done.finish, done.stop_reason) == ([7, 0], "(", Finish.STOP, None)
    assert one.tokens == [1, 7, 0]
    one = request(tokens=frozenset({8}))
    assert commit(one, [7, 8, 9], LONGEST)[2:] == (Finish.STOP, 8)
    assert commit(request(2), [7, 8, 9], LONGEST).tokens == [7, 8]
    assert commit(request(), [7, 8, 9], 3).finish is Finish.LENGTH


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    one = request(strings=["abc"])
    assert commit(one, letters("xab"), LONGEST).text == "x"
    assert commit(one, letters("d"), LONGEST).text == "abd"
    assert commit(one, letters("a"), LONGEST).text == ""
    assert commit(one, letters("bc"), LONGEST)[1:] == ("", Finish.STOP, "abc")
