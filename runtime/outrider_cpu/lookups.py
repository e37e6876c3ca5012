"""`spec_decode.ngram`: proposals of prompt lookup.

vLLM has two kernels: one scores blocks of positions, one takes the best. Here the first leaves the best match in
`scratch`, and the second reads it.
"""

from __future__ import annotations

from typing import Any

from outrider_cpu.arrays import compiled, inlined

Array = Any


@inlined
def _same(row: Array, at: int, other: int, length: int) -> bool:
    equal = 0
    while equal < length and row[at + equal] == row[other + equal]:
        equal += 1
    return equal == length


@inlined
def _best_match(row: Array, length: int, shortest: int, longest: int) -> tuple[int, int]:
    """Return (n, position) of the longest earlier copy of the text's end, the latest of equal length; (0, 0): none."""
    best, place = 0, 0
    for at in range(length - shortest - 1, -1, -1):
        for n in range(min(longest, length - 1 - at), max(best, shortest - 1), -1):
            if _same(row, at, length - n, n):
                best, place = n, at
                break
        if best == longest:
            break
    return best, place


@compiled
def scan(
    grid: tuple[int, int],  # (requests, blocks)
    token_ids: Array,  # (most requests, max_model_len)
    idx_mapping: Array,
    total_len: Array,  # (most requests,)
    num_sampled: Array,  # (requests,)
    scratch: Array,  # (most requests, blocks) int64
    L: int,  # noqa: N803
    MIN_N: int,  # noqa: N803
    MAX_N: int,  # noqa: N803
) -> None:
    """`_ngram_scan_kernel`: scratch[:, 0] = n * (L + 1) + position + 1 of the best match; 0 without one."""
    for place in range(grid[0]):
        scratch[place] = 0
        length = total_len[idx_mapping[place]]
        if num_sampled[place] > 0 and length >= MIN_N:
            n, at = _best_match(token_ids[idx_mapping[place]], length, MIN_N, MAX_N)
            if n > 0:
                scratch[place, 0] = n * (L + 1) + at + 1


@compiled
def finalize(
    grid: tuple[int],  # (requests,)
    token_ids: Array,  # (most requests, max_model_len)
    idx_mapping: Array,
    total_len: Array,  # (most requests,)
    num_sampled: Array,  # (requests,)
    last_sampled: Array,  # (most requests,)
    scratch: Array,  # (most requests, blocks)
    drafts: Array,  # (most requests, k)
    L: int,  # noqa: N803
    K: int,  # noqa: N803
) -> None:
    """`_ngram_finalize_kernel`: the tokens that followed the match, then copies of the last token."""
    for place in range(grid[0]):
        request = idx_mapping[place]
        drafts[place, :K] = last_sampled.reshape(-1)[request]
        score = scratch[place, 0] - 1
        if score < 0 or num_sampled[place] <= 0:
            continue
        start = score % (L + 1) + score // (L + 1)
        for i in range(min(K, total_len[request] - start)):
            drafts[place, i] = token_ids[request, start + i]
