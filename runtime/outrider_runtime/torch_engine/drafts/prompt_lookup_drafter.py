"""Prompt lookup: proposes what followed the last tokens where they stood before in the same request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.torch_engine.drafting import CommittedStep, DraftTask, TorchDrafter
from outrider_runtime.torch_engine.tree import Tree, chain


class PromptLookupDrafter(TorchDrafter):
    weight_bytes = kv_bytes_per_token = 0
    layers: tuple[int, ...] = ()

    def __init__(self, shortest: int, longest: int) -> None:
        """Tokens that must match."""
        self._shortest, self._longest = shortest, longest

    def propose(self, step: CommittedStep, ask: DraftTask) -> list[Tree]:
        """Chains, whatever width is asked for."""
        return [
            self._follow(np.array(one.request.tokens), ask) if asks else Tree()
            for one, asks in zip(step.ran, ask.asks, strict=True)
        ]

    def _follow(self, tokens: NDArray[np.int64], ask: DraftTask) -> Tree:
        """What followed the longest match, of those the last one."""
        for length in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            places = len(tokens) - length  # where a match may begin, the end itself left out
            same = np.ones(places, bool)
            for offset in range(length):
                same &= tokens[offset : offset + places] == tokens[places + offset]
            found = np.flatnonzero(same)
            if len(found):
                return chain(tokens[found[-1] + length :][: ask.depth].tolist(), ask.drafter, length)
        return Tree()
