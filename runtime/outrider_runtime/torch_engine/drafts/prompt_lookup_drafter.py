"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the request's last tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.torch_engine.drafting import CommittedStep, DraftTask, TorchDrafter
from outrider_runtime.torch_engine.tree import Tree, chain


class PromptLookupDrafter(TorchDrafter):
    """Needs no model: its proposals are copied from the request's own prompt and answer."""

    weight_bytes = kv_bytes_per_token = 0
    layers: tuple[int, ...] = ()

    def __init__(self, shortest: int, longest: int) -> None:
        """shortest, longest: tokens of a match."""
        self._shortest = shortest
        self._longest = longest

    def propose(self, step: CommittedStep, task: DraftTask) -> list[Tree]:
        """Propose a chain for each request, whatever the task's width."""
        return [
            self._follow(np.array(request_step.request.tokens), task) if is_requested else Tree()
            for request_step, is_requested in zip(step.request_steps, task.is_requested, strict=True)
        ]

    def _follow(self, tokens: NDArray[np.int64], task: DraftTask) -> Tree:
        """Propose what followed the longest match; of several equally long ones, the last. tokens: (n,)."""
        for length in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            starts = len(tokens) - length  # possible starts of a match, without the last tokens themselves
            matches = np.ones(starts, bool)  # (starts,)
            for offset in range(length):
                matches &= tokens[offset : offset + starts] == tokens[starts + offset]
            match_starts = np.flatnonzero(matches)
            if len(match_starts):
                proposed = tokens[match_starts[-1] + length :][: task.depth]
                return chain(proposed.tolist(), task.drafter, length)
        return Tree()
