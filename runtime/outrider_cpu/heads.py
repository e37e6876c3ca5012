"""`spec_decode.target_dependent_ar`: inputs of a head that reads the target's hidden states (EAGLE)."""

from __future__ import annotations

from typing import Any

from outrider_cpu.arrays import compiled

Array = Any


@compiled
def prepare_prefill_inputs(
    grid: tuple[int],  # (requests,)
    last_token_indices: Array,  # (most requests,)
    draft_current_step: Array,  # scalar
    draft_input_ids: Array,  # (most tokens,)
    draft_positions: Array,  # (most tokens,)
    draft_query_start_loc: Array,  # (most requests + 1,)
    draft_seq_lens: Array,  # (most requests,)
    target_input_ids: Array,  # (most tokens,)
    target_positions: Array,  # (most tokens,)
    idx_mapping: Array,
    last_sampled: Array,  # (most requests, 1)
    next_prefill_tokens: Array,  # (most requests,)
    num_sampled: Array,  # (requests,)
    num_rejected: Array,  # (requests,)
    query_start_loc: Array,
    seq_lens: Array,
    max_num_reqs: int,
) -> None:
    """`_prepare_prefill_inputs_kernel`: the target's accepted tokens, shifted by one, and the token after them."""
    requests = grid[0]
    for place in range(requests):
        request, first = idx_mapping[place], query_start_loc[place]
        length = query_start_loc[place + 1] - first - num_rejected[place]
        last = first + length - 1
        for i in range(length):
            draft_positions[first + i] = target_positions[first + i]
        for i in range(1, length):
            draft_input_ids[first + i - 1] = target_input_ids[first + i]
        if num_sampled[place] > 0:
            draft_input_ids[last] = last_sampled.reshape(-1)[request]
        else:
            draft_input_ids[last] = next_prefill_tokens.reshape(-1)[request]
        last_token_indices[place] = last
        draft_query_start_loc[place] = first
        draft_seq_lens[place] = seq_lens[place]
    draft_current_step[()] = 0
    draft_query_start_loc[requests : max_num_reqs + 1] = query_start_loc[requests]
    draft_seq_lens[requests:max_num_reqs] = 0
    last_token_indices[requests:max_num_reqs] = 0


@compiled
def prepare_decode_inputs(
    grid: tuple[int],  # (requests + 1,)
    draft_tokens: Array,  # (requests,)
    target_seq_lens: Array,  # (requests,)
    num_rejected: Array,  # (requests,)
    input_ids: Array,
    positions: Array,
    sample_src_positions: Array,  # (most requests,): where in its stream of noise a request is
    query_start_loc: Array,
    seq_lens: Array,
    max_model_len: int,
    max_num_reqs: int,
    ADVANCE_DRAFT_POSITIONS: bool,  # noqa: N803
) -> None:
    """`_prepare_decode_inputs_kernel`: the first pass's token of each request becomes the input of the second pass."""
    requests = grid[0] - 1
    for place in range(requests):
        input_ids[place] = draft_tokens[place]
        sample_src_positions[place] += 1
        length = target_seq_lens[place] - num_rejected[place]
        if ADVANCE_DRAFT_POSITIONS:
            positions[place] = min(positions[place] + 1, max_model_len - 1)
            length = min(length + 1, max_model_len)
        seq_lens[place] = length
    for place in range(max_num_reqs + 1):
        query_start_loc[place] = min(place, requests)
    seq_lens[requests:max_num_reqs] = 0


@compiled
def update_draft_inputs(
    grid: tuple[int],  # (requests,)
    output_draft_tokens: Array,  # (most requests, k)
    next_input_hidden_states: Array,  # (most tokens, hidden)
    input_ids: Array,
    positions: Array,
    sample_src_positions: Array,
    seq_lens: Array,
    draft_tokens: Array,  # (requests,)
    current_draft_step: Array,  # scalar
    hidden_states: Array,  # (requests, hidden)
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    ADVANCE_DRAFT_POSITIONS: bool,  # noqa: N803
) -> None:
    """`_update_draft_inputs_kernel`: store a pass's proposals, and make them the next pass's input."""
    step = current_draft_step[()]
    for place in range(grid[0]):
        output_draft_tokens[place, step] = draft_tokens[place]
        if step >= num_speculative_steps - 1:
            continue
        next_input_hidden_states[place, :hidden_size] = hidden_states[place, :hidden_size]
        input_ids[place] = draft_tokens[place]
        sample_src_positions[place] += 1
        if ADVANCE_DRAFT_POSITIONS:
            positions[place] = min(positions[place] + 1, max_model_len - 1)
            seq_lens[place] = min(seq_lens[place] + 1, max_model_len)
