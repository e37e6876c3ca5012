"""How sure a model is of each token that it proposes.

vLLM calls a hook wherever a drafter's logits are, inside of whole graphs as well, for an estimator that the pool leaves
off: what a confidence is worth is learned by the loop (`loop.confidences`).
"""

from __future__ import annotations

from typing import Any

import torch

LEAST_LOG = -30.0
"""The least log P(another token is right): a model that is sure of its token would have infinite odds."""

LEAST_PROBABILITY = 1e-7
"""The least P(right), and P(wrong), that a trained head is believed: in 8 bits anything less looks alike."""


def log_odds(logits: torch.Tensor) -> torch.Tensor:
    """(rows,) of (rows, vocabulary): log(p / (1 - p)), p the probability of the likeliest token."""
    wide = logits.float()
    log_p = wide.amax(dim=-1) - wide.logsumexp(dim=-1)
    return log_p - torch.log1p(-log_p.exp()).clamp(min=LEAST_LOG)


class Confident:
    """A base before vLLM's speculator."""

    gives_confidence = True
    """Whether anything reads it; before memory is measured it is taken to."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        rows, columns = self.max_num_reqs + 1, self.num_speculative_steps  # type: ignore[attr-defined]
        self.confidence = torch.zeros(rows, columns, device=device)
        """(most requests + 1, most tokens) by slot of the request states: log-odds of each token; the last row takes
        what belongs to no request."""

    def _maybe_predict_acceptance(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, draft_step: torch.Tensor
    ) -> None:
        """logits: (rows, vocabulary). idx_mapping: (rows,), slots; negative: no request's. draft_step: (rows,), or one
        for all."""
        if self.gives_confidence:
            self._note_confidence(log_odds(logits), idx_mapping, draft_step)

    def _note_confidence(self, values: torch.Tensor, idx_mapping: torch.Tensor, draft_step: torch.Tensor) -> None:
        """values: (rows,), log-odds; else as above."""
        rows = torch.where(idx_mapping < 0, self.confidence.shape[0] - 1, idx_mapping).long()
        self.confidence.index_put_((rows, draft_step.long().expand_as(rows)), values)
