"""The draft-only forward over holes in the draft's KV (worker process).

vLLM's proposer has the pass that is needed: at K = 0 it runs the draft over the tokens of a step to write their KV, and
proposes nothing. Here the tokens are those that the draft missed, in the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from outrider_runtime.vllm_plugin.messages import CatchUp


def run_over_holes(drafter: Any, holes: Sequence[CatchUp], rows: Sequence[int], arguments: Sequence[Any]) -> None:
    """Write the draft's KV of `holes`.

    The proposer takes the tokens of a step and the one that follows them, of each request: all together are the hole.
    rows: of the requests in the batch. arguments: of `propose_draft_token_ids`, of which the sampling metadata, the
    target's hidden states (a draft model reads neither) and the block table are passed on. Raises what the draft does.
    """
    sampling_metadata, hidden_states, metadata = arguments[0], arguments[1], arguments[-2]
    device = metadata.block_table_tensor.device
    drafter.propose(
        num_speculative_tokens=0,
        target_token_ids=_tensor([token for one in holes for token in one.token_ids[:-1]], device),
        target_positions=_tensor([at for one in holes for at in range(one.start, one.end - 1)], device, torch.int64),
        target_hidden_states=hidden_states,
        next_token_ids=_tensor([one.token_ids[-1] for one in holes], device),
        token_indices_to_sample=None,
        common_attn_metadata=_attention(holes, metadata.block_table_tensor[_tensor(rows, device, torch.int64)]),
        sampling_metadata=sampling_metadata,
    )


def _attention(holes: Sequence[CatchUp], blocks: torch.Tensor) -> CommonAttentionMetadata:
    """Of a step that computes all tokens of the holes but the last ones. blocks: (requests, blocks of a request)."""
    lengths = [len(one.token_ids) - 1 for one in holes]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)  # (requests + 1,)
    seen = torch.tensor([one.end - 1 for one in holes], dtype=torch.int32)  # (requests,)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(blocks.device),
        query_start_loc_cpu=starts,
        seq_lens=seen.to(blocks.device),
        seq_lens_cpu_upper_bound=seen + 1,  # the proposer adds the last tokens, and leaves this as it is
        num_reqs=len(holes),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=int(seen.max()),
        block_table_tensor=blocks,
        slot_mapping=torch.empty(0, dtype=torch.int64, device=blocks.device),  # the proposer makes its own
        causal=True,
    )


def _tensor(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
