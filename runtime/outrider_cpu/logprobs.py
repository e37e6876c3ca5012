"""`sample.logprob`, `sample.prompt_logprob`: log-probabilities of chosen tokens, and their ranks."""

from __future__ import annotations

from typing import Any

import torch

from outrider_cpu.arrays import compiled

Array = Any
Tensor = torch.Tensor


def topk_log_softmax(output: Tensor, logits: Tensor, topk_ids: Tensor) -> None:
    """`_topk_log_softmax_kernel`: output (rows, k), the log-probability of each of topk_ids (rows, k)."""
    wide = logits.float()
    output.copy_(wide.gather(1, topk_ids) - torch.logsumexp(wide, -1, keepdim=True))


def ranks(output: Tensor, logits: Tensor, token_ids: Tensor) -> None:
    """`_ranks_kernel`: the number of tokens that are at least as likely as the chosen one, itself included."""
    torch.sum(logits >= logits.gather(1, token_ids.view(-1, 1)), dim=-1, out=output)


@compiled
def fill_logprob_token_ids(
    out_token_ids: Array,  # (rows, 1 + columns)
    out_valid_mask: Array,  # (rows, 1 + columns)
    sampled_token_ids: Array,  # (rows,)
    topk_indices: Array,  # (rows, NUM_TOPK), or anything where that is 0
    expanded_idx_mapping: Array,  # (rows,)
    num_per_req_token_ids: Array,  # (most requests,)
    per_req_token_ids: Array,  # (most requests, most tokens): those that a request asks for by name
    NUM_TOPK: int,  # noqa: N803
) -> None:
    """`_fill_logprob_token_ids_kernel`: tokens whose log-probabilities a row reports: the sampled one, and others."""
    for row in range(len(out_token_ids)):
        request = expanded_idx_mapping[row]
        named = num_per_req_token_ids[request]
        out_token_ids[row, 0] = sampled_token_ids[row]
        for i in range(named if named > 0 else NUM_TOPK):
            out_token_ids[row, 1 + i] = per_req_token_ids[request, i] if named > 0 else topk_indices[row, i]
        out_valid_mask[row, : 1 + (named if named > 0 else NUM_TOPK)] = True


@compiled
def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: Array,  # (tokens,)
    query_start_loc: Array,
    idx_mapping: Array,
    num_computed_tokens: Array,  # (most requests,)
    all_token_ids: Array,  # (most requests, max_model_len)
) -> None:
    """`_prompt_logprobs_token_ids_kernel`: the token after each token of this step."""
    for place in range(len(idx_mapping)):
        request, first = idx_mapping[place], query_start_loc[place]
        for i in range(query_start_loc[place + 1] - first):
            after = num_computed_tokens[request] + i + 1
            prompt_logprobs_token_ids[first + i] = all_token_ids[request, min(after, all_token_ids.shape[1] - 1)]
