"""Suffix drafters and prompt lookup: propose what followed an earlier occurrence of the request's last tokens."""

from __future__ import annotations

import numpy as np

from outrider_runtime.drafters.longest_match import follow_matches
from outrider_runtime.drafters.suffix import MatchLengths
from outrider_runtime.torch_engine.drafting import CommittedStep, DraftTask, TorchDrafter
from outrider_runtime.torch_engine.tree import Tree, chain

FIRST = np.zeros(1, np.int64)


class SuffixDrafter(TorchDrafter):
    """Needs no model: its proposals are copied from the request's own prompt and answer."""

    weight_bytes = kv_bytes_per_token = 0
    layers: tuple[int, ...] = ()

    def __init__(self, match: MatchLengths) -> None:
        self._match = match

    def propose(self, step: CommittedStep, task: DraftTask) -> list[Tree]:
        """Propose a chain for each request, whatever the task's width."""
        return [
            self._follow(request_step.request.tokens, task) if is_requested else Tree()
            for request_step, is_requested in zip(step.request_steps, task.is_requested, strict=True)
        ]

    def _follow(self, tokens: list[int], task: DraftTask) -> Tree:
        text, length = np.array([tokens], np.int32), np.array([len(tokens)])
        proposals = follow_matches(text, FIRST, length, self._match, task.depth)
        if not proposals.counts[0]:
            return Tree()
        return chain(proposals.tokens[0].tolist(), task.drafter, proposals.confidence[0].tolist())
