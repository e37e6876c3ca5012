"""`spec_decode.standalone_ar`: inputs of a draft model's first pass."""

from __future__ import annotations

from typing import Any

from outrider_cpu.arrays import compiled

Array = Any


@compiled
def prepare_prefill_inputs(
    grid: tuple[int],  # (requests,)
    target_input_ids: Array,  # (most tokens,)
    target_positions: Array,  # (most tokens,)
    last_sampled: Array,  # (most requests, 1)
    idx_mapping: Array,
    out_input_ids: Array,  # (tokens + requests,): one place more a request than the target had
    out_positions: Array,
    last_token_indices: Array,  # (most requests,)
    out_query_start_loc: Array,  # (most requests + 1,)
    out_seq_lens: Array,  # (most requests,)
    query_start_loc: Array,
    seq_lens: Array,
    num_rejected: Array,  # (requests,)
    max_num_reqs: int,
    max_model_len: int,
) -> None:
    """`_prepare_prefill_inputs_kernel`: accepted tokens, the target's next token, and 0 for each rejected token."""
    requests = grid[0]
    for place in range(requests):
        first = query_start_loc[place]
        length = query_start_loc[place + 1] - first
        accepted = length - num_rejected[place]
        out = first + place
        for i in range(length + 1):
            out_input_ids[out + i] = target_input_ids[first + i] if i < accepted else 0
            out_positions[out + i] = min(target_positions[first] + i, max_model_len - 1)
        out_input_ids[out + accepted] = last_sampled.reshape(-1)[idx_mapping[place]]
        last_token_indices[place] = out + accepted
        out_query_start_loc[place] = out
        out_seq_lens[place] = min(seq_lens[place] + 1, max_model_len)
    out_query_start_loc[requests : max_num_reqs + 1] = query_start_loc[requests] + requests
    out_seq_lens[requests:max_num_reqs] = 0
    last_token_indices[requests:max_num_reqs] = 0
