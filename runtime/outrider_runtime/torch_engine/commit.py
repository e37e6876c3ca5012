"""How an answer goes on: which proposals hold, and where it ends.

`walk` finds the path that the target's own draws take through what was proposed; `commit` cuts it at the first end and
writes it down. Tokens past the cut exist for nobody; `verdicts` is what the loop learns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.data.forest import ROOT
from outrider_runtime.loop.steps import Verdicts
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.tree import Tree


class FinishReason(StrEnum):
    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"


class Committed(NamedTuple):
    tokens: list[int]
    """Those of the path that are part of the answer."""
    text: str
    """That may go out now."""
    finish: FinishReason | None = None
    """None: more will come."""
    stop_reason: int | str | None = None
    """The stop token or string of the request that ended it; None for an end token of the model's."""


class AcceptedPath(NamedTuple):
    """The way of the target's own draws through a tree."""

    places: Sequence[int]
    """ROOT, then the nodes that hold: behind each the target drew a token."""
    tokens: Sequence[int]
    """Those tokens; the last one is the bonus token."""

    def until(self, tokens: int) -> AcceptedPath:
        """The first of them."""
        return AcceptedPath(self.places[:tokens], self.tokens[:tokens])


def walk(tree: Tree, drawn: Mapping[int, int]) -> AcceptedPath:
    """drawn: ROOT and each node that was scored -> the target's own token behind it. Exact for every tree that does not
    hang on these draws."""
    places, tokens, at = list[int](), list[int](), ROOT
    while at in drawn:
        places.append(at)
        tokens.append(drawn[at])
        at = tree.child(at, drawn[at])
    return AcceptedPath(places, tokens)


class JudgedTree(NamedTuple):
    tree: Tree
    scored: Sequence[int]
    path: AcceptedPath
    """As far as it is part of the answer."""


def verdicts(judged: Sequence[JudgedTree]) -> Verdicts:
    """Of all nodes, tree after tree."""
    rows = [row for one in judged for row in _rows(one)]
    return Verdicts(*np.array(rows, bool).reshape(-1, 3).T)


def _rows(one: JudgedTree) -> Iterator[tuple[bool, bool, bool]]:
    """Of each node: verified, accepted, tried. One that was not scored may carry the bonus token all the same; in a
    chain that was drawn that would be chance, as rejection sampling keeps more of what it scores."""
    scored = set(one.scored)
    kept = {one.tree.child(place, token) for place, token in zip(*one.path, strict=True)}
    for node, parent in enumerate(one.tree.parents):
        counts = node in scored or not one.tree.drawn_from
        yield node in scored, counts and node in kept, counts and parent in one.path.places


def commit(request: Request, path: Sequence[int], longest: int) -> Committed:
    """The answer goes on by `path`. longest: tokens, the prompt's included, that the model takes."""
    stops, taken = request.stops, list[int]()
    for token in path:
        taken.append(token)
        request.tokens.append(token)
        if token in stops.end_tokens:
            return Committed(taken, _rest(request), FinishReason.STOP)
        if token in stops.tokens:
            return Committed(taken, _rest(request), FinishReason.STOP, token)
        before = len(request.text)
        request.text += request.detokenizer.step(token)
        found = _stop_string(request, before)
        if found is not None:
            at, string = found
            request.text = request.text[:at]
            return Committed(taken, _rest(request), FinishReason.STOP, string)
        if request.emitted >= stops.max_tokens or len(request.tokens) >= longest:
            return Committed(taken, _rest(request), FinishReason.LENGTH)
    return Committed(taken, _told(request, len(request.text) - _held_back(request)))


def _stop_string(request: Request, before: int) -> tuple[int, str] | None:
    """The stop string that the text after `before` completes first, and where it begins; of several that end at one
    place, the one that the request names first. So does vLLM (`check_stop_strings`)."""
    found = [
        (at, string)
        for string in request.stops.strings
        if (at := request.text.find(string, max(0, before - len(string) + 1))) >= 0
    ]
    return min(found, key=lambda one: one[0] + len(one[1]), default=None)


def _held_back(request: Request) -> int:
    """Characters at the text's end that may be the beginning of a stop string."""
    strings = request.stops.sorted_strings
    longest = max(map(len, strings), default=1) - 1
    for length in range(min(longest, len(request.text)), 0, -1):
        end = request.text[-length:]
        after = bisect_left(strings, end)  # the first string that could begin so
        if after < len(strings) and strings[after].startswith(end):
            return length
    return 0


def _rest(request: Request) -> str:
    return _told(request, len(request.text))


def _told(request: Request, until: int) -> str:
    """Of the text, what has not gone out yet."""
    begin, request.told = request.told, max(request.told, until)
    return request.text[begin:until]
