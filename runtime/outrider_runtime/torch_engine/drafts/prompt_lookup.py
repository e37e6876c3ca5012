"""Prompt lookup: proposes what followed the last tokens where they stood before in the same request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.loop.caches import Hole
from outrider_runtime.torch_engine.drafting import Finished
from outrider_runtime.torch_engine.requests import Request


class PromptLookup:
    def __init__(self, shortest: int, longest: int) -> None:
        """Tokens that must match."""
        self._shortest, self._longest = shortest, longest

    def close(self, holes: Sequence[tuple[Request, Hole]]) -> None:
        """It has no cache."""

    def propose(self, step: Finished, asks: Sequence[bool], most: int) -> list[list[int]]:
        return [
            self._follow(np.array(one.request.tokens), most) if asked else []
            for one, asked in zip(step.ran, asks, strict=True)
        ]

    def forget(self, request: str) -> None:
        """It has no cache."""

    def _follow(self, tokens: NDArray[np.int64], most: int) -> list[int]:
        """What followed the longest match, of those the last one."""
        for length in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            places = len(tokens) - length  # where a match may begin, the end itself left out
            same = np.ones(places, bool)
            for offset in range(length):
                same &= tokens[offset : offset + places] == tokens[places + offset]
            found = np.flatnonzero(same)
            if len(found):
                follows: list[int] = tokens[found[-1] + length :][:most].tolist()
                return follows
        return []
