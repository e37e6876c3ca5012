"""Prompt lookup as a member of the pool: proposes the tokens that followed the same n-gram earlier in the request.

The search is vLLM's, on the device. vLLM fills the row of a request without a match with its last token; here such a
row is no proposal.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator


class PromptLookupMember(NgramGPUSpeculator):  # type: ignore[misc]  # vLLM is untyped here
    follow_up_tokens: torch.Tensor
    """(requests,): tokens that followed the match of the last search; 0: no match."""
    matched: torch.Tensor
    """(requests,): length of the n-gram that matched, the drafter's confidence; 0: no match."""

    def propose(self, input_batch: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        made: torch.Tensor = super().propose(input_batch, *arguments, **keywords)
        if not keywords.get("dummy_run", False):
            self._grade(input_batch)
        return made

    def _grade(self, input_batch: Any) -> None:
        """Read length and position of each match from vLLM's scratch buffer.

        The kernel leaves `length * (max_model_len + 1) + position + 1` for each block's best match.
        """
        best = self.scratch[: input_batch.num_reqs].amax(dim=1) - 1  # -1: no match
        there = best >= 0
        width = self.max_model_len + 1
        self.matched = torch.where(there, best // width, 0)
        known = self.req_states.total_len.gpu[input_batch.idx_mapping]
        followed = known - (best % width + self.matched)
        self.follow_up_tokens = torch.where(there, followed, 0).clamp(0, self.num_speculative_steps)
