"""Suffix drafters and prompt lookup as members of the pool; see `drafters.suffix`.

On a CPU the compiled search reads the requests' texts where they are. On a GPU the same search runs on the device,
since only the device knows the last tokens with asynchronous scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from outrider_runtime.drafters.kept_answers import NO_OWNER, KeptAnswers
from outrider_runtime.drafters.longest_match import follow_matches
from outrider_runtime.drafters.suffix import MatchLengths
from outrider_runtime.loop.shared_answers import SharedAnswers
from outrider_runtime.vllm_plugin.suffix_search import search


class SuffixMember(BaseSpeculator):  # type: ignore[misc]  # vLLM is untyped here
    supports_mm_inputs = False
    draft_logits = None

    follow_up_tokens: torch.Tensor
    """(requests,): tokens that followed the match of the last search; 0: no match."""
    evidence: torch.Tensor
    """(requests, most tokens): confidence in each of them."""

    def __init__(
        self, vllm_config: Any, device: torch.device, req_states: Any, match: MatchLengths,
        kept: KeptAnswers | None = None,
    ) -> None:  # fmt: skip
        """kept: answers that requests share. Raises ValueError on a GPU, whose search does not reach them."""
        if kept is not None and device.type != "cpu":
            raise ValueError("its scope needs a CPU: on a GPU a suffix drafter searches the request's own text only")
        self.num_speculative_steps: int = vllm_config.speculative_config.num_speculative_tokens
        self._states = req_states
        self._match = match
        self._device = device
        self._kept = kept
        self._owners = np.zeros(0, np.int64)

    def share(self, shared: SharedAnswers | None, rows: Sequence[int]) -> None:
        """Keep finished answers, and note whose the batch's requests may use: none if nothing is said.

        rows: columns of the batch's requests in `shared`.
        """
        self._owners = np.full(len(rows), NO_OWNER)
        if self._kept is not None and shared is not None:
            self._kept.update(shared.finished, shared.now_s)
            self._owners = shared.owners[rows]

    def init_cudagraph_manager(self, _cudagraph_mode: Any) -> None:
        """Make none: it runs no model."""

    def capture(self) -> None:
        """Capture nothing."""

    @torch.inference_mode()
    def propose(  # vLLM calls it by position while it serves, and by name while it measures memory on a GPU
        self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: Any,  # noqa: ARG002
        aux_hidden_states: Any, num_sampled: torch.Tensor, *_arguments: Any, dummy_run: bool = False,  # noqa: ARG002
        **_keywords: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Return (requests, most tokens) int64. A request that has sampled no token yet gets no proposal."""
        most = self.num_speculative_steps
        rows = input_batch.idx_mapping.long()
        lengths = torch.where(num_sampled[: len(rows)] > 0, self._states.total_len.gpu[rows], 0).long()
        texts = self._states.all_token_ids.gpu
        if self._device.type == "cpu":
            searched = texts.numpy(), rows.numpy(), lengths.numpy()
            made = follow_matches(*searched, self._match, most)
            if self._kept is not None and not dummy_run:
                self._kept.improve(made, *searched, self._owners)
            tokens, self.follow_up_tokens, self.evidence = map(torch.from_numpy, made)
        else:  # the whole width in a dummy run, whose memory vLLM measures; the last token was sampled in this step
            end = texts.shape[1] if dummy_run else int(input_batch.seq_lens_cpu_upper_bound.numpy().max()) + 1
            tokens, self.follow_up_tokens, self.evidence = search(texts[:, :end], rows, lengths, self._match, most)
        return tokens
