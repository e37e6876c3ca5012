"""Our stand-ins reshape logits as vLLM's kernels do: what a request asks for holds on a CPU."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engine.stand_ins.batches import LENGTH, REQUESTS, VOCABULARY, Batch
from tests.engine.stand_ins.interpreted import Outcome, assert_same, with_stand_ins_and_without

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


def scaled_and_masked(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu import structured_outputs
    from vllm.v1.worker.gpu.sample import gumbel, min_p

    batch = Batch(generator)
    logits = batch.random_logits(torch.float32)
    outcome: Outcome = {}
    gumbel.apply_temperature(logits, batch.row_request, batch.temperature)
    outcome["temperature"] = logits.clone()
    min_p.apply_min_p(logits, batch.row_request, torch.tensor([0.0, 0.1, 0.2, 0.0, 0.05, 0.3]))
    outcome["min_p"] = logits.clone()
    masks = batch.integers(-(2**31), 2**31, 2, math.ceil(VOCABULARY / 32)).int()
    structured_outputs._apply_grammar_bitmask_kernel[(2, 1)](
        logits, logits.stride(0), torch.tensor([0, 4], dtype=torch.int32), batch.first_logit, masks, masks.stride(0),
        VOCABULARY, MASK_STRIDE=4, BLOCK_SIZE=8192,
    )  # fmt: skip
    outcome["grammar"] = logits
    return outcome


def penalised(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu.sample import penalties

    batch = Batch(generator)
    logits, followed = batch.random_logits(torch.float32), batch.integers(0, 50, batch.rows).int()
    mask = torch.zeros(REQUESTS, math.ceil(VOCABULARY / 32), dtype=torch.int32)
    counts = torch.zeros(REQUESTS, VOCABULARY, dtype=torch.int32)
    read = (batch.prompt + batch.integers(0, 9, REQUESTS)).int()
    penalties.bincount(batch.requests, batch.text, batch.prompt, read, mask, counts, int(read.max()))
    penalties.apply_penalties(
        logits, batch.row_request, followed, batch.row_place, torch.tensor([1.0, 1.2, 0.8, 1.0, 2.0, 1.0]),
        torch.tensor([0.0, 0.5, 0.0, 0.3, -0.4, 0.0]), torch.tensor([0.0, 0.0, 1.5, 0.2, -0.1, 0.0]), mask, counts,
    )  # fmt: skip
    return {"logits": logits, "mask": mask, "counts": counts}


def biased(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu.sample.logit_bias import apply_logit_bias

    batch, outcome = Batch(generator), Outcome()
    for check in (False, True):
        logits = batch.random_logits(torch.float32)
        tokens = torch.randperm(VOCABULARY, generator=generator)[: 8 * REQUESTS].view(REQUESTS, 8).int()
        stops = tokens[:, :3].contiguous()  # among the allowed ones, so that forbidding them may leave nothing
        apply_logit_bias(
            logits, batch.row_request, batch.integers(0, 40, batch.rows), batch.integers(0, 4, REQUESTS).int(), tokens,
            batch.integers(0, 5, REQUESTS).int(), batch.integers(0, VOCABULARY, REQUESTS, 8).int().sort().values,
            batch.normal(REQUESTS, 8), batch.integers(0, 50, REQUESTS).int(), batch.integers(0, 4, REQUESTS).int(),
            batch.integers(0, 2, REQUESTS).int(), stops, check,
        )  # fmt: skip
        outcome[f"check {check}"] = logits
    return outcome


def without_bad_words(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words

    batch = Batch(generator)
    text = batch.integers(0, 3, REQUESTS, LENGTH).int()  # few tokens, so that words begin to match
    lengths = torch.nn.functional.pad(batch.integers(1, 4, REQUESTS, 5).cumsum(1), (1, 0)).int()
    logits = batch.random_logits(torch.float32)
    apply_bad_words(
        logits, batch.row_request, batch.integers(0, 3, REQUESTS, 20).int(), lengths,
        batch.integers(0, 6, REQUESTS).int(), text, batch.prompt, (batch.prompt + batch.integers(0, 5, REQUESTS)).int(),
        batch.integers(0, 3, batch.rows).int(), batch.row_place, 5,
    )  # fmt: skip
    return {"logits": logits}


CASES = (scaled_and_masked, penalised, biased, without_bad_words)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_logits_are_those_of_the_kernels(case, seed):
    """Promise: temperature, min_p, grammars, penalties, biases and bad words mean on a CPU what they mean on a GPU."""
    assert_same(*with_stand_ins_and_without(case, seed))
