"""A block drafter's inputs, and DFlash2's choice, are by our stand-ins what vLLM's kernels make of random batches."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.engine.stand_ins.interpreted import Outcome, assert_same, with_stand_ins_and_without

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
MOST_REQUESTS, MOST_TOKENS, PAGES, PAGE_TOKENS, LONGEST = 6, 96, 8, 16, 120
UNWRITTEN = -7
OUTPUTS = {
    "input_ids": (MOST_TOKENS, torch.int32),
    "query_positions": (MOST_TOKENS, torch.int64),
    "is_padding": (MOST_TOKENS, torch.int32),  # in newer versions of vLLM
    "query_start_loc": (MOST_REQUESTS + 1, torch.int32),
    "seq_lens": (MOST_REQUESTS, torch.int32),
    "query_slot_mapping": (MOST_TOKENS, torch.int64),
    "context_positions": (MOST_TOKENS, torch.int64),
    "context_slot_mapping": (MOST_TOKENS, torch.int64),
}
SAMPLE_OUTPUTS = ("sample_indices", "sample_pos", "sample_idx_mapping")


def inputs_of_a_block(generator: torch.Generator) -> Outcome:
    """Prompts in chunks, rejected tokens, pages that no request owns, requests that end at the longest length."""
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    requests, tokens, from_anchor = (int(n) for n in torch.randint(0, 6, (3,), generator=generator))
    requests, tokens, anchor = 1 + requests, 1 + tokens, bool(from_anchor % 2)
    width = tokens + (0 if anchor else 1)
    lengths = torch.randint(1, 9, (requests,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    first = torch.randint(0, LONGEST - 8, (requests,), generator=generator)
    positions = torch.zeros(MOST_TOKENS, dtype=torch.int64)
    for row in range(requests):
        positions[starts[row] : starts[row + 1]] = first[row] + torch.arange(int(lengths[row]))
    rejected = (torch.rand(requests, generator=generator) * lengths).long().clamp(max=lengths - 1)
    table = torch.randint(0, 40, (MOST_REQUESTS, PAGES), generator=generator, dtype=torch.int32)
    kernel = speculator._prepare_dflash_inputs_kernel
    parameters = inspect.signature(getattr(kernel, "kernel", kernel).fn).parameters
    outputs = {name: output for name, output in OUTPUTS.items() if f"out_{name}_ptr" in parameters}
    made = {name: torch.full((size,), UNWRITTEN, dtype=kind) for name, (size, kind) in outputs.items()}
    made |= {name: torch.full((MOST_REQUESTS * tokens,), UNWRITTEN) for name in SAMPLE_OUTPUTS}
    made |= {"temperature": torch.zeros(MOST_REQUESTS), "seeds": torch.zeros(MOST_REQUESTS, dtype=torch.int64)}
    inputs: list[Any] = [
        positions, starts, torch.randperm(MOST_REQUESTS, generator=generator)[:requests],
        torch.arange(MOST_REQUESTS).view(-1, 1) + 100,
        torch.arange(MOST_REQUESTS, dtype=torch.int32).view(1, -1) + 200,
        (torch.rand(requests, generator=generator) > 0.3).long(), rejected,
        torch.rand(MOST_REQUESTS, generator=generator), torch.arange(MOST_REQUESTS) + 5, table, table.stride(0),
        9, PAGE_TOKENS, width, tokens, MOST_REQUESTS, MOST_TOKENS, LONGEST, 0,
    ]  # fmt: skip
    grid = (requests, -(-(int(lengths.max()) + width) // 8))
    kernel[grid](
        *made.values(), *inputs, SAMPLE_FROM_ANCHOR=anchor, PAD_SLOT_ID=-1, CP_SIZE=1, CP_INTERLEAVE=1, BLOCK_SIZE=8
    )
    return made


def walk_over_candidates(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu.spec_decode.dflash2 import speculator

    requests, steps, top = (1 + int(n) for n in torch.randint(0, 4, (3,), generator=generator))
    scores = torch.randn(requests, steps, top, top, generator=generator)
    candidates = torch.randint(0, 1000, (requests, steps, top), generator=generator)
    state = torch.arange(requests).repeat_interleave(steps)
    state[-steps:] = -1  # no request's
    tokens, realized = torch.zeros(8, steps, dtype=torch.int64), torch.zeros(8, steps, top)
    speculator._selector_walk_kernel[(requests,)](
        scores, candidates, torch.zeros(requests * steps, dtype=torch.int64), state, torch.zeros(8),
        torch.zeros(8, dtype=torch.int64), tokens, realized, num_steps=steps, top_k=top, BLOCK_K=4,
        SAMPLE_PROBABILISTIC=False, USE_FP64=False,
    )  # fmt: skip
    return {"tokens": tokens, "realized": realized}


CASES = (inputs_of_a_block, walk_over_candidates)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", CASES)
def test_stand_in_computes_what_the_kernel_computes(case: Any, seed: int) -> None:
    assert_same(*with_stand_ins_and_without(case, seed))
