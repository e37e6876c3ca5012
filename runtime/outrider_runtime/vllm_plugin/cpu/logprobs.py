"""`sample.logprob`: log-probabilities of chosen tokens, and their ranks."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def topk_log_softmax(output: Tensor, logits: Tensor, topk_ids: Tensor) -> None:
    """`_topk_log_softmax_kernel`: output (rows, k), the log-probability of each of topk_ids (rows, k)."""
    wide = logits.float()
    output.copy_(wide.gather(1, topk_ids) - torch.logsumexp(wide, -1, keepdim=True))


def ranks(output: Tensor, logits: Tensor, token_ids: Tensor) -> None:
    """`_ranks_kernel`: how many tokens are as likely as the one chosen, itself among them."""
    torch.sum(logits >= logits.gather(1, token_ids.view(-1, 1)), dim=-1, out=output)
