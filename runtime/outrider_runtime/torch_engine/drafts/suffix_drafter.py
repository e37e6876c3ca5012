"""Suffix drafters and prompt lookup: propose what followed an earlier occurrence of the request's last tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.drafters.kept_answers import KeptAnswers
from outrider_runtime.drafters.longest_match import follow_matches
from outrider_runtime.drafters.suffix import MatchLengths
from outrider_runtime.loop.shared_answers import SharedAnswers
from outrider_runtime.torch_engine.drafting import CommittedStep, DraftTask, TorchDrafter
from outrider_runtime.torch_engine.tree import Tree, chain

FIRST = np.zeros(1, np.int64)


class SuffixDrafter(TorchDrafter):
    """Needs no model: its proposals are copied from the request's own text, and from answers that requests share."""

    weight_bytes = kv_bytes_per_token = 0
    layers: tuple[int, ...] = ()

    def __init__(self, match: MatchLengths, kept: KeptAnswers | None = None) -> None:
        """kept: answers that requests share."""
        self._match = match
        self._kept = kept
        self._owners = np.zeros(0, np.int64)

    def share(self, shared: SharedAnswers, /) -> None:
        if self._kept is not None:
            self._kept.update(shared.finished, shared.now_s)
            self._owners = shared.owners

    def propose(self, step: CommittedStep, task: DraftTask) -> list[Tree]:
        """Propose a chain for each request, whatever the task's width."""
        return [
            self._follow(request_step.request.tokens, task, self._owners[row : row + 1]) if is_requested else Tree()
            for row, (request_step, is_requested) in enumerate(zip(step.request_steps, task.is_requested, strict=True))
        ]

    def _follow(self, tokens: list[int], task: DraftTask, owners: NDArray[np.int64]) -> Tree:
        text, length = np.array([tokens], np.int32), np.array([len(tokens)])
        proposals = follow_matches(text, FIRST, length, self._match, task.depth)
        if self._kept is not None:
            self._kept.improve(proposals, text, FIRST, length, owners)
        count = proposals.counts[0]
        return chain(proposals.tokens[0, :count].tolist(), task.drafter, proposals.confidence[0, :count].tolist())
