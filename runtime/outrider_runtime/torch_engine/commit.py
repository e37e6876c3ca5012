"""How an answer continues: which proposals are accepted, and where it ends.

`walk` follows the target's own draws through the tree of proposals. `commit` appends the tokens of that path to the
request, up to the first stop condition, and discards the rest. `verdicts` reports each node to the control loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.plans import ROOT
from outrider_runtime.loop.steps import NodeVerdicts
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.tree import Tree


class FinishReason(StrEnum):
    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"


class Committed(NamedTuple):
    """What one step adds to one answer."""

    tokens: list[int]
    """The tokens of the path up to the end of the answer."""
    text: str
    """Text that may be sent; the start of a possible stop string is held back."""
    finish: FinishReason | None = None
    """None: the answer is not complete."""
    stop_reason: int | str | None = None
    """The stop token or string, named by the request, that ended the answer; None for the model's own end token."""


class AcceptedPath(NamedTuple):
    """The path that the target's own draws take through a tree of proposals."""

    places: Sequence[int]
    """ROOT, then the accepted nodes."""
    tokens: Sequence[int]
    """The token that the target drew after each place; the last one is the bonus token."""

    def cut(self, tokens: int) -> AcceptedPath:
        """The path's first `tokens` tokens."""
        return AcceptedPath(self.places[:tokens], self.tokens[:tokens])


def walk(tree: Tree, drawn: Mapping[int, int]) -> AcceptedPath:
    """Follow the target's draws from ROOT for as long as each drawn token was proposed.

    drawn: ROOT and each scored node -> the target's own token after it. The answer's distribution is exact as long as
    the tree does not depend on these draws.
    """
    places = list[int]()
    tokens = list[int]()
    place = ROOT
    while place in drawn:
        places.append(place)
        tokens.append(drawn[place])
        place = tree.child(place, drawn[place])
    return AcceptedPath(places, tokens)


class JudgedTree(NamedTuple):
    """A request's proposals after verification."""

    tree: Tree
    scored: Sequence[int]
    """Nodes that the target scored in this step."""
    path: AcceptedPath
    """The accepted path, cut at the end of the answer."""


def verdicts(judged_trees: Sequence[JudgedTree]) -> NodeVerdicts:
    """Columns over the nodes of all trees, tree after tree; each is contiguous, as compiled code takes them."""
    rows = [row for judged in judged_trees for row in _rows(judged)]
    return NodeVerdicts(*np.ascontiguousarray(np.array(rows, bool).reshape(-1, 3).T))


def _rows(judged: JudgedTree) -> Iterator[tuple[bool, bool, bool]]:
    """Yield (verified, accepted, tried) for each node.

    A node that was not scored may still match the bonus token, and then counts as accepted. Not so in a chain that was
    drawn from a drafter's distribution: rejection sampling accepts a scored token more often than such a match occurs,
    so counting it would make the drafter look worse.
    """
    scored = set(judged.scored)
    accepted = {judged.tree.child(place, token) for place, token in zip(*judged.path, strict=True)}
    for node, parent in enumerate(judged.tree.parents):
        counts = node in scored or not judged.tree.drawn_from
        yield node in scored, counts and node in accepted, counts and parent in judged.path.places


def commit(request: Request, path: Sequence[int], longest: int) -> Committed:
    """Append the tokens of `path` to the answer, up to its first stop condition.

    longest: tokens that prompt and answer may have together.
    """
    stops = request.stops
    taken = list[int]()
    for token in path:
        taken.append(token)
        request.tokens.append(token)
        if token in stops.end_tokens:
            return Committed(taken, _rest(request), FinishReason.STOP)
        if token in stops.tokens:
            return Committed(taken, _rest(request), FinishReason.STOP, token)
        before = len(request.text)
        request.text += request.detokenizer.step(token)
        stop = _stop_string(request, before)
        if stop is not None:
            begin, string = stop
            request.text = request.text[:begin]
            return Committed(taken, _rest(request), FinishReason.STOP, string)
        if request.emitted >= stops.max_tokens or len(request.tokens) >= longest:
            return Committed(taken, _rest(request), FinishReason.LENGTH)
    return Committed(taken, _send_until(request, len(request.text) - _held_back(request)))


def _stop_string(request: Request, before: int) -> tuple[int, str] | None:
    """Find the stop string that ends first in the text after `before`; return where it begins, and the string.

    When several end at the same character, the one that the request names first wins, as in vLLM
    (`check_stop_strings`).
    """
    stops = [
        (begin, string)
        for string in request.stops.strings
        if (begin := request.text.find(string, max(0, before - len(string) + 1))) >= 0
    ]
    return min(stops, key=lambda stop: stop[0] + len(stop[1]), default=None)


def _held_back(request: Request) -> int:
    """Count the characters at the end of the text that may begin a stop string."""
    strings = request.stops.sorted_strings
    longest = max(map(len, strings), default=1) - 1
    for length in range(min(longest, len(request.text)), 0, -1):
        end = request.text[-length:]
        after = bisect_left(strings, end)  # the first string that could start with `end`
        if after < len(strings) and strings[after].startswith(end):
            return length
    return 0


def _rest(request: Request) -> str:
    """Return all text that was not sent yet, and mark it as sent."""
    return _send_until(request, len(request.text))


def _send_until(request: Request, until: int) -> str:
    """Return the text up to `until` that was not sent yet, and mark it as sent."""
    begin = request.sent_characters
    request.sent_characters = max(begin, until)
    return request.text[begin:until]
