"""`spec_decode.dflash`, `dflash2`: inputs of a block drafter's pass, and DFlash2's choice among candidates."""

from __future__ import annotations

from typing import Any

from outrider_cpu.arrays import compiled, inlined

Array = Any


@inlined
def _slot(table: Array, row: int, position: int, block_size: int, padding: int) -> int:
    """Return a token's slot in the KV cache; block 0 belongs to no request."""
    block = table[row, min(position // block_size, table.shape[1] - 1)]
    return block * block_size + position % block_size if block else padding


@compiled
def prepare_inputs(
    grid: tuple[int, int],  # (requests, ...)
    out_input_ids: Array,  # (most tokens,)
    out_query_positions: Array,
    out_query_start_loc: Array,  # (most requests + 1,)
    out_seq_lens: Array,  # (most requests,)
    out_query_slot_mapping: Array,
    out_context_positions: Array,
    out_context_slot_mapping: Array,
    out_sample_indices: Array,  # (most requests * most proposals,)
    out_sample_pos: Array,
    out_sample_idx_mapping: Array,
    out_temperature: Array,
    out_seeds: Array,
    target_positions: Array,
    target_query_start_loc: Array,
    idx_mapping: Array,
    last_sampled: Array,  # (most requests, 1)
    next_prefill_tokens: Array,  # (lookahead, most requests)
    num_sampled: Array,
    num_rejected: Array,
    temperature: Array,
    seeds: Array,
    block_table: Array,  # (rows, pages)
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    SAMPLE_FROM_ANCHOR: bool,  # noqa: N803
    PAD_SLOT_ID: int,  # noqa: N803
    out_is_padding: Array = None,  # (most tokens,)
) -> None:
    """`_prepare_dflash_inputs_kernel`: slots of the context's keys, and a block of one token and masks behind it."""
    requests, width, anchor = grid[0], num_query_per_req, 0 if SAMPLE_FROM_ANCHOR else 1
    for row in range(requests):
        request, first, after = idx_mapping[row], target_query_start_loc[row], target_query_start_loc[row + 1]
        valid = after - num_rejected[row]
        for i in range(first, after):
            kept = i < valid
            out_context_positions[i] = target_positions[i] if kept else 0
            out_context_slot_mapping[i] = (
                _slot(block_table, row, target_positions[i], block_size, PAD_SLOT_ID) if kept else PAD_SLOT_ID
            )
        begins = target_positions[valid - 1] + 1
        for i in range(width):
            at, position = row * width + i, begins + i
            out_input_ids[at] = parallel_drafting_token_id
            out_query_positions[at] = min(position, max_model_len - 1)
            out_query_slot_mapping[at] = _slot(block_table, row, position, block_size, PAD_SLOT_ID)
            if i >= anchor:
                sample = row * num_speculative_steps + i - anchor
                out_sample_indices[sample] = at
                out_sample_pos[sample] = position + 1 - anchor
                out_sample_idx_mapping[sample] = request
        if num_sampled[row] > 0:
            out_input_ids[row * width] = last_sampled.reshape(-1)[request]
        else:
            out_input_ids[row * width] = next_prefill_tokens.reshape(-1)[request]
        out_query_start_loc[row] = row * width
        out_seq_lens[row] = min(begins + width, max_model_len)
        out_temperature[request] = temperature[request]
        out_seeds[request] = seeds[request]
    out_query_start_loc[requests : max_num_reqs + 1] = requests * width
    out_seq_lens[requests:max_num_reqs] = 0
    samples = slice(requests * num_speculative_steps, max_num_reqs * num_speculative_steps)
    out_sample_indices[samples] = 0
    out_sample_pos[samples] = 0
    out_sample_idx_mapping[samples] = -1
    padding = slice(requests * width, max_num_tokens)
    out_query_slot_mapping[padding] = PAD_SLOT_ID
    if out_is_padding is not None:
        out_is_padding[: requests * width] = False
        out_is_padding[padding] = True
        out_input_ids[padding] = 0
        out_query_positions[padding] = 0


@compiled
def walk(
    grid: tuple[int],  # (requests,)
    scores: Array,  # (requests * places, candidates before, candidates)
    candidate: Array,  # (requests * places, candidates)
    req_state: Array,  # (requests * places,): negative: no request's
    tokens: Array,  # (most requests, places)
    realized_scores: Array,
    num_steps: int,
    top_k: int,
    SAMPLE_PROBABILISTIC: bool,  # noqa: N803
) -> None:
    """`_selector_walk_kernel`, greedy: the best candidate at each position, given the one before it."""
    if SAMPLE_PROBABILISTIC:
        raise NotImplementedError("proposals are not sampled")
    by_place, candidates = scores.reshape(-1), candidate.reshape(-1)
    made, realized = tokens.reshape(-1), realized_scores.reshape(-1)
    for row in range(grid[0]):
        if req_state[row * num_steps] < 0:
            continue
        before = 0
        for place in range(row * num_steps, (row + 1) * num_steps):
            first = (place * top_k + before) * top_k
            best = 0
            for rank in range(top_k):
                realized[place * top_k + rank] = by_place[first + rank]
                if by_place[first + rank] > by_place[first + best]:
                    best = rank
            made[place] = candidates[place * top_k + best]
            before = best
