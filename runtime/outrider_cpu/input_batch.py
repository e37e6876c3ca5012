"""`input_batch`: the inputs of a step's batch, and the updates of request states after it.

`idx_mapping` gives each request of the batch its row in the request states; `query_start_loc` and `cu_num_logits` say
where each request's tokens and logits begin, and end with their total.
"""

from __future__ import annotations

from typing import Any

from outrider_cpu.arrays import compiled

Array = Any


@compiled
def prepare_prefill_inputs(
    input_ids: Array,  # (most tokens,)
    next_prefill_tokens: Array,  # (lookahead, most requests)
    num_lookahead: int,
    idx_mapping: Array,
    query_start_loc: Array,
    all_token_ids: Array,  # (most requests, max_model_len)
    prefill_lens: Array,  # (most requests,)
    num_computed_tokens: Array,  # (most requests,)
) -> None:
    """`_prepare_prefill_inputs_kernel`: a prompt's tokens of this step, and the tokens after them."""
    for place in range(len(idx_mapping)):
        request = idx_mapping[place]
        computed, prefill = num_computed_tokens[request], prefill_lens[request]
        if computed >= prefill:
            continue
        first = query_start_loc[place]
        length = query_start_loc[place + 1] - first
        for i in range(length):
            input_ids[first + i] = all_token_ids[request, computed + i]
        for i in range(num_lookahead):
            at = computed + length + i
            next_prefill_tokens[i, request] = all_token_ids[request, at] if at < prefill else 0


@compiled
def prepare_pos_seq_lens(
    pos: Array,  # (most tokens,)
    seq_lens: Array,  # (most requests,)
    idx_mapping: Array,
    query_start_loc: Array,
    num_computed_tokens: Array,  # (most requests,)
    max_num_reqs: int,
) -> None:
    """`_prepare_pos_seq_lens_kernel`: each token's position, each request's length with this step's tokens."""
    requests = len(idx_mapping)
    for place in range(requests):
        computed = num_computed_tokens[idx_mapping[place]]
        first = query_start_loc[place]
        length = query_start_loc[place + 1] - first
        seq_lens[place] = computed + length
        for i in range(length):
            pos[first + i] = computed + i
    seq_lens[requests:max_num_reqs] = 0


@compiled
def combine_sampled_and_draft_tokens(
    input_ids: Array,  # (most tokens,)
    idx_mapping: Array,
    last_sampled_tokens: Array,  # (most requests, 1)
    query_start_loc: Array,
    seq_lens: Array,  # (most requests,), by place in the batch
    prefill_len: Array,  # (most requests,)
    draft_tokens: Array,  # (most requests, k)
    cu_num_logits: Array,
    logits_indices: Array,  # (logits,)
    NUM_NEW_SAMPLED_TOKENS: int,  # noqa: N803
) -> None:
    """`_combine_sampled_and_draft_tokens_kernel`: a decoding request's input: its last token, then its proposals."""
    for place in range(len(idx_mapping)):
        request = idx_mapping[place]
        logits = cu_num_logits[place + 1] - cu_num_logits[place]
        end = query_start_loc[place + 1]
        for i in range(logits):
            logits_indices[cu_num_logits[place] + i] = end - logits + i
        if seq_lens[place] <= prefill_len[request]:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and seq_lens[place] - logits >= prefill_len[request]:
            input_ids[end - logits] = last_sampled_tokens.reshape(-1)[request]
        proposals = logits - NUM_NEW_SAMPLED_TOKENS
        for i in range(proposals):
            input_ids[end - proposals + i] = draft_tokens[request, i]


@compiled
def get_num_sampled_and_rejected(
    num_sampled: Array,  # (requests,)
    num_rejected: Array,  # (requests,)
    seq_lens: Array,  # (most requests,), by place in the batch
    cu_num_logits: Array,
    idx_mapping: Array,
    prefill_len: Array,  # (most requests,)
) -> None:
    """`_get_num_sampled_and_rejected_kernel`: both counts are 0 for a request that is still in prefill."""
    for place in range(len(idx_mapping)):
        if seq_lens[place] < prefill_len[idx_mapping[place]]:
            num_sampled[place] = num_rejected[place] = 0
        else:
            num_rejected[place] = cu_num_logits[place + 1] - cu_num_logits[place] - num_sampled[place]


@compiled
def post_update(
    idx_mapping: Array,  # negative: not to be updated
    num_computed_tokens: Array,  # (most requests,)
    last_sampled_tokens: Array,  # (most requests, 1)
    output_bin_counts: Array,  # (most requests, vocabulary), or None
    sampled_tokens: Array,  # (requests, k + 1)
    num_sampled: Array,  # (requests,)
    num_rejected: Array,  # (requests,)
    query_start_loc: Array,  # or None
    all_token_ids: Array,  # (most requests, max_model_len)
    total_len: Array,  # (most requests,)
    draft_tokens: Array = None,  # (requests, k), from another stage of a pipeline
    draft_tokens_out: Array = None,  # (most requests, k)
) -> None:
    """`_post_update_kernel`: store sampled tokens in the request states; rejected tokens count as not computed."""
    for place in range(len(idx_mapping)):
        request = idx_mapping[place]
        if request < 0:
            continue
        if draft_tokens is not None:
            draft_tokens_out[request] = draft_tokens[place]
        count, length = num_sampled[place], total_len[request]
        for i in range(count):
            token = sampled_tokens[place, i]
            all_token_ids[request, length + i] = token
            if output_bin_counts is not None:
                output_bin_counts[request, token] += 1
        if count > 0:
            last_sampled_tokens.reshape(-1)[request] = sampled_tokens[place, count - 1]
            total_len[request] = length + count
        if query_start_loc is not None:
            num_computed_tokens[request] += query_start_loc[place + 1] - query_start_loc[place]
        num_computed_tokens[request] -= num_rejected[place]


@compiled
def post_update_num_computed_tokens(idx_mapping: Array, num_computed_tokens: Array, query_start_loc: Array) -> None:
    """`_post_update_num_computed_tokens_kernel`: the step's tokens are computed; none was sampled."""
    for place in range(len(idx_mapping)):
        num_computed_tokens[idx_mapping[place]] += query_start_loc[place + 1] - query_start_loc[place]


@compiled
def expand_idx_mapping(
    idx_mapping: Array,
    expanded_idx_mapping: Array,  # (logits,): each row's request
    expanded_local_pos: Array,  # (logits,): each row's place among its request's
    cu_num_logits: Array,
) -> None:
    """`_expand_idx_mapping_kernel`: the request of each row of logits."""
    for place in range(len(idx_mapping)):
        first = cu_num_logits[place]
        for i in range(cu_num_logits[place + 1] - first):
            expanded_idx_mapping[first + i] = idx_mapping[place]
            expanded_local_pos[first + i] = i
