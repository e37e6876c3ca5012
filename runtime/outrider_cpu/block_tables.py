"""`block_table`: the KV blocks of a batch's requests, and the KV slots of its tokens."""

from __future__ import annotations

from typing import Any

from outrider_cpu.arrays import compiled, row_at

Array = Any


@compiled
def gather_block_tables(
    grid: tuple[int, int],  # (groups, requests with padding)
    batch_idx_to_req_idx: Array,  # (requests,)
    src_block_table_ptrs: Array,  # (groups,)
    dst_block_table_ptrs: Array,  # (groups,)
    block_table_strides: Array,  # (groups,)
    num_blocks: Array,  # (groups, most requests)
    num_reqs: int,
    num_computed_tokens: Array = None,  # (most requests,)
    sliding_window_reach: Array = None,  # (groups,): tokens before a request's first one that it reads; 0: all
    block_sizes: Array = None,  # (groups,)
    MASK_SLIDING_WINDOW: bool = False,  # noqa: N803
) -> None:
    """`_gather_block_tables_kernel`: the batch's rows of each group's block table, in the batch's order.

    Blocks before a sliding window may belong to other requests by now; block 0 stands in for them.
    """
    for group in range(grid[0]):
        stride = block_table_strides[group]
        for place in range(grid[1]):
            to = row_at(dst_block_table_ptrs[group], place, stride)
            if place >= num_reqs:
                to[:] = 0
                continue
            request = batch_idx_to_req_idx[place]
            length = num_blocks[group, request]
            to[:length] = row_at(src_block_table_ptrs[group], request, stride)[:length]
            if sliding_window_reach is not None:
                reach = sliding_window_reach[group]
                if MASK_SLIDING_WINDOW and reach > 0:
                    to[: min(length, max(num_computed_tokens[request] - reach, 0) // block_sizes[group])] = 0


@compiled
def compute_slot_mappings(
    grid: tuple[int, int],  # (groups, requests + 1)
    max_num_tokens: int,
    idx_mapping: Array,  # (requests,): -1 is a dummy request, which owns no blocks
    query_start_loc: Array,  # (requests + 1,)
    pos: Array,  # (tokens,)
    block_table_ptrs: Array,  # (groups,)
    block_table_strides: Array,  # (groups,)
    block_sizes: Array,  # (groups,)
    slot_mapping_enabled: Array,  # (groups,)
    slot_mappings: Array,  # (groups, most tokens)
    CP_SIZE: int,  # noqa: N803
    PAD_ID: int,  # noqa: N803
) -> None:
    """`_compute_slot_mappings_kernel`: the KV slot of each token; PAD_ID behind the last one."""
    assert CP_SIZE == 1, "context parallelism has no stand-in"
    requests = grid[1] - 1
    for group in range(grid[0]):
        size = block_sizes[group]
        for place in range(requests):
            request = idx_mapping[place]
            first, end = query_start_loc[place], query_start_loc[place + 1]
            if request < 0 or not slot_mapping_enabled[group]:
                slot_mappings[group, first:end] = PAD_ID
                continue
            row = row_at(block_table_ptrs[group], request, block_table_strides[group])
            for token in range(first, end):
                slot_mappings[group, token] = row[pos[token] // size] * size + pos[token] % size
        slot_mappings[group, query_start_loc[requests] : max_num_tokens] = PAD_ID
