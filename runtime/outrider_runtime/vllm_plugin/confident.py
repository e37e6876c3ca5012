"""A model's confidence in each token that it proposes: the log-odds of the token.

vLLM calls a hook for each drafter's logits, in full CUDA graphs as well. The hook is meant for vLLM's own estimator,
which the pool does not use: the loop calibrates confidences (`loop.confidences`).
"""

from __future__ import annotations

from typing import Any

import torch

MIN_LOG_PROBABILITY = -30.0
"""Lower bound of log P(another token is right): the odds of a certain token would be infinite."""

MIN_PROBABILITY = 1e-7
"""Bound of a trained head's probabilities, from 0 and from 1: 8 bits do not distinguish smaller ones."""


def log_odds(logits: torch.Tensor) -> torch.Tensor:
    """(rows,): log(p / (1 - p)), with p the probability of the likeliest token. logits: (rows, vocabulary)."""
    wide = logits.float()
    log_p = wide.amax(dim=-1) - wide.logsumexp(dim=-1)
    return log_p - torch.log1p(-log_p.exp()).clamp(min=MIN_LOG_PROBABILITY)


class Confident:
    """Records confidences: a base class before vLLM's speculator."""

    gives_confidence = True
    """Whether confidences are used; assumed until memory is measured."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        rows, columns = self.max_num_reqs + 1, self.num_speculative_steps  # type: ignore[attr-defined]
        self.confidence = torch.zeros(rows, columns, device=device)
        """(most requests + 1, most tokens) by slot of the request states: log-odds of each token.

        The last row takes values that belong to no request.
        """

    def _maybe_predict_acceptance(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, draft_step: torch.Tensor
    ) -> None:
        """Record the confidence of logits (rows, vocabulary). This is vLLM's hook.

        idx_mapping: (rows,), slots; negative: of no request. draft_step: (rows,), or one for all rows.
        """
        if self.gives_confidence:
            self._note_confidence(log_odds(logits), idx_mapping, draft_step)

    def _note_confidence(self, values: torch.Tensor, idx_mapping: torch.Tensor, draft_step: torch.Tensor) -> None:
        """Record log-odds. values: (rows,). The other arguments are those of `_maybe_predict_acceptance`."""
        rows = torch.where(idx_mapping < 0, self.confidence.shape[0] - 1, idx_mapping).long()
        self.confidence.index_put_((rows, draft_step.long().expand_as(rows)), values)
