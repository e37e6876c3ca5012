"""`sample.penalties`: lower logits of tokens that a request has used already."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider_cpu.arrays import compiled

Array = Any
_F32, _I32 = np.float32, np.int32


@compiled
def count_tokens(
    expanded_idx_mapping: Array,  # (new requests,)
    all_token_ids: Array,  # (most requests, max_model_len)
    prompt_len: Array,  # (most requests,)
    prefill_len: Array,  # (most requests,): longer than the prompt after a preemption
    prompt_bin_mask: Array,  # (most requests, vocabulary / 32) int32: a bit is set where the prompt has a token
    output_bin_counts: Array,  # (most requests, vocabulary)
) -> None:
    """`_bincount_kernel`: the tokens of a prompt, and the count of each generated token."""
    for request in expanded_idx_mapping:
        for place in range(prompt_len[request]):
            token = all_token_ids[request, place]
            prompt_bin_mask[request, token // 32] |= _I32(1) << _I32(token % 32)
        for place in range(prompt_len[request], prefill_len[request]):
            output_bin_counts[request, all_token_ids[request, place]] += 1


@compiled
def apply_penalties(
    logits: Array,  # (rows, vocabulary) float32
    expanded_idx_mapping: Array,  # (rows,)
    token_ids: Array,  # (rows,): the token that each row follows
    expanded_local_pos: Array,  # (rows,)
    repetition_penalty: Array,  # (most requests,)
    frequency_penalty: Array,  # (most requests,)
    presence_penalty: Array,  # (most requests,)
    prompt_bin_mask: Array,  # (most requests, vocabulary / 32)
    output_bin_counts: Array,  # (most requests, vocabulary)
    vocab_size: int,
) -> None:
    """`_penalties_kernel`: proposals before a row count as generated there."""
    for row in range(len(logits)):
        request, place = expanded_idx_mapping[row], expanded_local_pos[row]
        repetition, frequency = repetition_penalty[request], frequency_penalty[request]
        presence = presence_penalty[request]
        if repetition == 1 and frequency == 0 and presence == 0:
            continue
        counts = output_bin_counts[request].copy()
        for before in range(row - place + 1, row + 1):
            counts[token_ids[before]] += 1
        in_prompt = prompt_bin_mask[request]
        for token in range(vocab_size):
            logit = logits[row, token]
            if counts[token] > 0 or (in_prompt[token // 32] >> _I32(token % 32)) & 1:
                logit = _F32(logit * (_F32(1) / repetition if logit > 0 else repetition))
            if counts[token] > 0:
                logit = _F32(_F32(logit - frequency * _F32(counts[token])) - presence)
            logits[row, token] = logit
