"""How an answer goes on: what is accepted, where it ends, and what goes out."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import given
from outrider_runtime.control.data.forest import ROOT
from outrider_runtime.torch_engine.commit import AcceptedPath, FinishReason, JudgedTree, commit, verdicts, walk
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops
from outrider_runtime.torch_engine.tree import Tree, chain, merged

from tests.unit.torch_engine.engines import Letters

LONGEST = 1000


def letters(text: str) -> list[int]:
    return [ord(letter) - 33 for letter in text]


def request(max_tokens: int = 100, strings: Iterable[str] = (), **stops: frozenset[int]) -> Request:
    return Request("r", [1], 1, Stops(max_tokens, strings=tuple(strings), **stops), Sampling(), Letters())


def tokens(tree: Tree, *drawn: int) -> list[int]:
    """Of the walk; drawn behind ROOT, node 0, 1, ..."""
    return list(walk(tree, dict(enumerate(drawn, ROOT))).tokens)


def test_proposals_hold_as_far_as_the_target_draws_them() -> None:
    assert tokens(chain([5, 6, 7], 0, 0.0), 5, 6, 8, 9) == [5, 6, 8]
    assert tokens(chain([5, 6], 0, 0.0), 5, 6, 7) == [5, 6, 7]
    assert tokens(chain([5], 0, 0.0), 4, 7) == [4]
    assert tokens(Tree(), 4) == [4]


def test_a_walk_descends_into_the_child_that_carries_what_was_drawn() -> None:
    """A sibling's subtree counts for nothing, even where it holds the same tokens."""
    tree = merged([chain(one, 0, 0.0) for one in ([5, 6], [4, 6, 7], [4, 8])])
    assert tree.tokens == [5, 6, 4, 6, 7, 8]
    assert walk(tree, dict(enumerate([4, 1, 2, 6, 7, 9, 3], ROOT))) == AcceptedPath([ROOT, 2, 3, 4], [4, 6, 7, 9])
    assert tokens(tree, 4, 6, 0, 8, 6, 7, 3) == [4, 8, 3]
    assert tokens(tree, 6, 6, 6, 6, 6, 6, 6) == [6]


def test_a_node_is_tried_where_the_target_drew_behind_its_parent() -> None:
    """Scored or not: one that was not scored may carry the bonus token. What lies behind the answer's end is none."""
    tree = merged([chain(one, 0, 0.0) for one in ([5, 6], [4, 6, 7], [4, 8])])
    scored = [0, 2, 3]
    path = walk(tree, {ROOT: 4, 0: 1, 2: 6, 3: 7})
    verified, accepted, tried = (one.tolist() for one in verdicts([JudgedTree(tree, scored, path)]))
    assert verified == [True, False, True, True, False, False]
    assert accepted == [False, False, True, True, True, False]
    assert tried == [True, False, True, True, True, True]
    verified, accepted, tried = (one.tolist() for one in verdicts([JudgedTree(tree, scored, path.until(1))] * 2))
    assert verified == [True, False, True, True, False, False] * 2
    assert accepted == [False, False, True, False, False, False] * 2
    assert tried == [True, False, True, False, False, False] * 2


def test_what_was_drawn_is_tried_only_where_it_is_judged() -> None:
    """That the bonus token is the same would be chance; counted as a trial it would make the drafter look worse."""
    tree = chain([5, 6], 0, float("nan"))
    tree.drawn_from = ["q5", "q6"]
    for bonus in (6, 7):
        judged = JudgedTree(tree, [0], walk(tree, {ROOT: 5, 0: bonus}))
        assert [one.tolist() for one in verdicts([judged])] == [[True, False]] * 3


@given(
    text=st.text("abc", max_size=12), strings=st.lists(st.text("abc", min_size=1, max_size=3), max_size=4),
    parts=st.lists(st.integers(1, 4), min_size=12, max_size=12), max_tokens=st.integers(1, 12),
)  # fmt: skip
def test_an_answer_does_not_hang_on_how_it_is_cut_into_steps(
    text: str, strings: list[str], parts: list[int], max_tokens: int
) -> None:
    """Several tokens a step or one: the same tokens, the same text, the same end; nothing of a stop string goes out."""
    ends = [text.find(one) + len(one) for one in strings if one in text]
    last = min([*ends, max_tokens, len(text)])
    stopped = [one for one in strings if text[:last].endswith(one)]
    wanted = last - len(stopped[0]) if stopped else last
    one, told, taken, finish, rest = request(max_tokens, strings), "", 0, None, text
    for part in parts:
        if finish is not None or not rest:
            break
        done = commit(one, letters(rest[:part]), LONGEST)
        told, taken, finish, rest = told + done.text, taken + len(done.tokens), done.finish, rest[part:]
        assert not any(string in told for string in strings)
        if finish is None:
            assert told == text[:taken].removesuffix(longest_beginning(text[:taken], strings))
    assert taken == last
    assert one.tokens[1:] == letters(text[:last])
    if finish is None:
        assert text[:last].startswith(told)
    else:
        assert told == text[:wanted]
        assert finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def longest_beginning(text: str, strings: list[str]) -> str:
    """Of a stop string, at the text's end."""
    ends = (text[place:] for place in range(len(text)))
    return next((end for end in ends if any(one.startswith(end) and one != end for one in strings)), "")


def test_tokens_behind_an_end_are_nobodys() -> None:
    one = request(end_tokens=frozenset({0}))
    done = commit(one, [7, 0, 8, 9], LONGEST)
    assert (done.tokens, done.text, done.finish, done.stop_reason) == ([7, 0], "(", FinishReason.STOP, None)
    assert one.tokens == [1, 7, 0]
    one = request(tokens=frozenset({8}))
    assert commit(one, [7, 8, 9], LONGEST)[2:] == (FinishReason.STOP, 8)
    assert commit(request(2), [7, 8, 9], LONGEST).tokens == [7, 8]
    assert commit(request(), [7, 8, 9], 3).finish is FinishReason.LENGTH


class Words:
    """A token is a word."""

    def step(self, token: int) -> str:
        return ("abc", "xaab")[token]


@pytest.mark.parametrize(
    ("strings", "token", "text", "reason"),
    [
        (["abc", "b"], 0, "a", "b"),
        (["abc", "c"], 0, "", "abc"),
        (["c", "abc"], 0, "ab", "c"),
        (["ab", "aa"], 1, "x", "aa"),
    ],
)
def test_of_several_stop_strings_in_one_token_the_one_that_ends_first_counts(
    strings: list[str], token: int, text: str, reason: str
) -> None:
    """Bug: the one that began first did. Of those that end together, the first one named counts."""
    one = Request("r", [1], 1, Stops(9, strings=tuple(strings)), Sampling(), Words())
    assert commit(one, [token], LONGEST)[1:] == (text, FinishReason.STOP, reason)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    one = request(strings=["abc"])
    assert commit(one, letters("xab"), LONGEST).text == "x"
    assert commit(one, letters("d"), LONGEST).text == "abd"
    assert commit(one, letters("a"), LONGEST).text == ""
    assert commit(one, letters("bc"), LONGEST)[1:] == ("", FinishReason.STOP, "abc")
