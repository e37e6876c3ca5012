"""How an answer goes on: which proposals hold, and where it ends.

`walk` finds the path that the target's own draws take through what was proposed; `commit` cuts it at the first end and
writes it down. Tokens past the cut exist for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from outrider_runtime.torch_engine.requests import Request


class Finish(StrEnum):
    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"


class Committed(NamedTuple):
    tokens: list[int]
    """Those of the path that are part of the answer."""
    text: str
    """That may go out now."""
    finish: Finish | None = None
    """None: more will come."""
    stop_reason: int | str | None = None
    """The stop token or string of the request that ended it; None for an end token of the model's."""


def walk(proposals: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The proposals that hold and the bonus token. drawn: the target's own token after 0, 1, ... of the proposals."""
    path = [drawn[0]]
    for proposed, own in zip(proposals, drawn[1:], strict=True):
        if proposed != path[-1]:
            break
        path.append(own)
    return path


def commit(request: Request, path: Sequence[int], longest: int) -> Committed:
    """The answer goes on by `path`. longest: tokens, the prompt's included, that the model takes."""
    stops, taken = request.stops, list[int]()
    for token in path:
        taken.append(token)
        request.tokens.append(token)
        if token in stops.end_tokens:
            return Committed(taken, _rest(request), Finish.STOP)
        if token in stops.tokens:
            return Committed(taken, _rest(request), Finish.STOP, token)
        before = len(request.text)
        request.text += request.detokenizer.step(token)
        found = _stop_string(request, before)
        if found is not None:
            at, string = found
            request.text = request.text[:at]
            return Committed(taken, _rest(request), Finish.STOP, string)
        if request.emitted >= stops.max_tokens or len(request.tokens) >= longest:
            return Committed(taken, _rest(request), Finish.LENGTH)
    return Committed(taken, _told(request, len(request.text) - _held_back(request)))


def _stop_string(request: Request, before: int) -> tuple[int, str] | None:
    """The first stop string that the text after `before` completes, and where it begins."""
    found = [
        (at, string)
        for string in request.stops.strings
        if (at := request.text.find(string, max(0, before - len(string) + 1))) >= 0
    ]
    return min(found, default=None)


def _held_back(request: Request) -> int:
    """Characters at the text's end that may be the beginning of a stop string."""
    longest = max(map(len, request.stops.strings), default=1) - 1
    for length in range(min(longest, len(request.text)), 0, -1):
        end = request.text[-length:]
        if any(string.startswith(end) for string in request.stops.strings):
            return length
    return 0


def _rest(request: Request) -> str:
    return _told(request, len(request.text))


def _told(request: Request, until: int) -> str:
    """Of the text, what has not gone out yet."""
    begin, request.told = request.told, max(request.told, until)
    return request.text[begin:until]
