"""`sample.logit_bias`, `sample.bad_words`: tokens that a request allows, prefers, or forbids."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider_cpu.arrays import compiled, inlined

Array = Any
_NEVER = np.float32(-np.inf)


@compiled
def apply_logit_bias(
    logits: Array,  # (rows, vocabulary) float32
    expanded_idx_mapping: Array,  # (rows,)
    num_allowed_token_ids: Array,  # (most requests,): 0 allows all
    allowed_token_ids: Array,  # (most requests, most allowed)
    num_logit_bias: Array,  # (most requests,)
    bias_token_ids: Array,  # (most requests, most biases)
    bias: Array,  # (most requests, most biases)
    pos: Array,  # (rows,)
    min_lens: Array,  # (most requests,): prompt and least output
    num_stop_token_ids: Array,  # (most requests,)
    restore_when_all_masked: Array,  # (most requests,)
    stop_token_ids: Array,  # (most requests, most stops)
    CHECK_ALL_MASKED_ROWS: bool,  # noqa: N803
) -> None:
    """`_bias_kernel`: allowed tokens, then biases, then no stop token before a request's least length."""
    for row in range(len(logits)):
        request, values = expanded_idx_mapping[row], logits[row]
        allowed = allowed_token_ids[request, : num_allowed_token_ids[request]]
        if len(allowed) > 0:
            _allow_only(values, allowed)
        for i in range(num_logit_bias[request]):
            values[bias_token_ids[request, i]] += bias[request, i]
        stops = stop_token_ids[request, : num_stop_token_ids[request]]
        if len(stops) > 0 and pos[row] + 1 < min_lens[request]:
            _forbid(values, stops, CHECK_ALL_MASKED_ROWS and restore_when_all_masked[request])


@inlined
def _allow_only(values: Array, allowed: Array) -> None:
    kept = np.empty(len(allowed), np.float32)
    for i in range(len(allowed)):
        kept[i] = values[allowed[i]]
    values[:] = _NEVER
    for i in range(len(allowed)):
        values[allowed[i]] = kept[i]


@inlined
def _forbid(values: Array, stops: Array, unless_nothing_is_left: bool) -> None:
    before = np.empty(len(stops), np.float32)
    for i in range(len(stops)):
        before[i] = values[stops[i]]
    for i in range(len(stops)):
        values[stops[i]] = _NEVER
    if unless_nothing_is_left and values.max() == _NEVER:
        for i in range(len(stops)):
            if np.isfinite(before[i]):
                values[stops[i]] = before[i]


@compiled
def apply_bad_words(
    logits: Array,  # (rows, vocabulary)
    expanded_idx_mapping: Array,  # (rows,)
    bad_word_token_ids: Array,  # (most requests, most tokens): the words one behind the other
    bad_word_offsets: Array,  # (most requests, most words + 1): where each begins
    num_bad_words: Array,  # (most requests,)
    all_token_ids: Array,  # (most requests, max_model_len)
    prompt_len: Array,  # (most requests,)
    total_len: Array,  # (most requests,)
    input_ids: Array,  # (rows,): the token that each row follows
    expanded_local_pos: Array,  # (rows,)
) -> None:
    """`_bad_words_kernel`: forbid a bad word's last token if the output, proposals included, ends in the rest of it."""
    for row in range(len(logits)):
        request, place = expanded_idx_mapping[row], expanded_local_pos[row]
        output = total_len[request] - prompt_len[request]
        for word in range(num_bad_words[request]):
            first, last = bad_word_offsets[request, word], bad_word_offsets[request, word + 1] - 1
            begin = output + place - (last - first)
            matches = begin >= 0
            for i in range(first, last):
                if not matches:
                    break
                at = begin + i - first
                if at >= output:
                    token = input_ids[row - place + at - output + 1]
                else:
                    token = all_token_ids[request, prompt_len[request] + at]
                matches = token == bad_word_token_ids[request, i]
            if matches:
                logits[row, bad_word_token_ids[request, last]] = _NEVER
