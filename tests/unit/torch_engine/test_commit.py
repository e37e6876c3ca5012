"""How an answer continues: what is accepted, where it ends, and which text is sent."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import given
from outrider_runtime.control.plans import ROOT
from outrider_runtime.torch_engine.commit import AcceptedPath, FinishReason, JudgedTree, commit, verdicts, walk
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops
from outrider_runtime.torch_engine.tree import Tree, chain, merge

from tests.unit.torch_engine.engines import Letters

LONGEST = 1000


def letters(text: str) -> list[int]:
    return [ord(letter) - 33 for letter in text]


def request(max_tokens: int = 100, strings: Iterable[str] = (), **stops: frozenset[int]) -> Request:
    return Request("r", [1], 1, Stops(max_tokens, strings=tuple(strings), **stops), Sampling(), Letters())


def tokens(tree: Tree, *drawn: int) -> list[int]:
    """Walk the tree and list the path's tokens. drawn: the target's token after ROOT, node 0, node 1, ..."""
    return list(walk(tree, dict(enumerate(drawn, ROOT))).tokens)


def test_walk_accepts_proposals_that_the_target_draws() -> None:
    assert tokens(chain([5, 6, 7], 0, 0.0), 5, 6, 8, 9) == [5, 6, 8]
    assert tokens(chain([5, 6], 0, 0.0), 5, 6, 7) == [5, 6, 7]
    assert tokens(chain([5], 0, 0.0), 4, 7) == [4]
    assert tokens(Tree(), 4) == [4]


def test_walk_descends_into_child_of_drawn_token() -> None:
    """A sibling's subtree counts for nothing, even where it holds the same tokens."""
    tree = merge([chain(path_tokens, 0, 0.0) for path_tokens in ([5, 6], [4, 6, 7], [4, 8])])
    assert tree.tokens == [5, 6, 4, 6, 7, 8]
    assert walk(tree, dict(enumerate([4, 1, 2, 6, 7, 9, 3], ROOT))) == AcceptedPath([ROOT, 2, 3, 4], [4, 6, 7, 9])
    assert tokens(tree, 4, 6, 0, 8, 6, 7, 3) == [4, 8, 3]
    assert tokens(tree, 6, 6, 6, 6, 6, 6, 6) == [6]


def test_verdicts_count_nodes_below_accepted_parents() -> None:
    """A node that was not scored counts too: it may match the bonus token. Those after the answer's end do not."""
    tree = merge([chain(tokens, 0, 0.0) for tokens in ([5, 6], [4, 6, 7], [4, 8])])
    scored = [0, 2, 3]
    path = walk(tree, {ROOT: 4, 0: 1, 2: 6, 3: 7})
    verified, accepted, tried = (tokens.tolist() for tokens in verdicts([JudgedTree(tree, scored, path)]))
    assert verified == [True, False, True, True, False, False]
    assert accepted == [False, False, True, True, True, False]
    assert tried == [True, False, True, True, True, True]
    verified, accepted, tried = (tokens.tolist() for tokens in verdicts([JudgedTree(tree, scored, path.cut(1))] * 2))
    assert verified == [True, False, True, True, False, False] * 2
    assert accepted == [False, False, True, False, False, False] * 2
    assert tried == [True, False, True, False, False, False] * 2


def test_verdicts_of_drawn_chain_count_scored_nodes_only() -> None:
    """A match with the bonus token is chance here; counted as a trial it would make the drafter look worse."""
    tree = chain([5, 6], 0, float("nan"))
    tree.drawn_from = ["q5", "q6"]
    for bonus in (6, 7):
        judged = JudgedTree(tree, [0], walk(tree, {ROOT: 5, 0: bonus}))
        assert [column.tolist() for column in verdicts([judged])] == [[True, False]] * 3


@given(
    text=st.text("abc", max_size=12), strings=st.lists(st.text("abc", min_size=1, max_size=3), max_size=4),
    parts=st.lists(st.integers(1, 4), min_size=12, max_size=12), max_tokens=st.integers(1, 12),
)  # fmt: skip
def test_answer_does_not_depend_on_tokens_per_step(
    text: str, strings: list[str], parts: list[int], max_tokens: int
) -> None:
    """One or several tokens per step: the same tokens, text and end; no part of a stop string is sent."""
    ends = [text.find(string) + len(string) for string in strings if string in text]
    last = min([*ends, max_tokens, len(text)])
    stopped = [string for string in strings if text[:last].endswith(string)]
    text_end = last - len(stopped[0]) if stopped else last
    answering, sent, taken, finish, rest = request(max_tokens, strings), "", 0, None, text
    for part in parts:
        if finish is not None or not rest:
            break
        done = commit(answering, letters(rest[:part]), LONGEST)
        sent, taken, finish, rest = sent + done.text, taken + len(done.tokens), done.finish, rest[part:]
        assert not any(string in sent for string in strings)
        if finish is None:
            assert sent == text[:taken].removesuffix(longest_beginning(text[:taken], strings))
    assert taken == last
    assert answering.tokens[1:] == letters(text[:last])
    if finish is None:
        assert text[:last].startswith(sent)
    else:
        assert sent == text[:text_end]
        assert finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def longest_beginning(text: str, strings: list[str]) -> str:
    """Find the longest start of a stop string at the text's end."""
    ends = (text[place:] for place in range(len(text)))
    return next((end for end in ends if any(string.startswith(end) and string != end for string in strings)), "")


def test_commit_discards_tokens_after_an_end() -> None:
    ended = request(end_tokens=frozenset({0}))
    done = commit(ended, [7, 0, 8, 9], LONGEST)
    assert (done.tokens, done.text, done.finish, done.stop_reason) == ([7, 0], "(", FinishReason.STOP, None)
    assert ended.tokens == [1, 7, 0]
    ended = request(tokens=frozenset({8}))
    assert commit(ended, [7, 8, 9], LONGEST)[2:] == (FinishReason.STOP, 8)
    assert commit(request(2), [7, 8, 9], LONGEST).tokens == [7, 8]
    assert commit(request(), [7, 8, 9], 3).finish is FinishReason.LENGTH


class Words:
    """Detokenizer of a vocabulary whose tokens are words."""

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
def test_stop_strings_in_one_token_first_end_wins(strings: list[str], token: int, text: str, reason: str) -> None:
    """Bug: the one that began first won. Of those that end together, the first in the request wins."""
    stopped = Request("r", [1], 1, Stops(9, strings=tuple(strings)), Sampling(), Words())
    assert commit(stopped, [token], LONGEST)[1:] == (text, FinishReason.STOP, reason)


def test_commit_holds_back_start_of_stop_string() -> None:
    unfinished = request(strings=["abc"])
    assert commit(unfinished, letters("xab"), LONGEST).text == "x"
    assert commit(unfinished, letters("d"), LONGEST).text == "abd"
    assert commit(unfinished, letters("a"), LONGEST).text == ""
    assert commit(unfinished, letters("bc"), LONGEST)[1:] == ("", FinishReason.STOP, "abc")
