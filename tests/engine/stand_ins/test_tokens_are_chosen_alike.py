"""Our stand-ins choose the tokens that vLLM's kernels choose, the random ones included: a seed means the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.engine.stand_ins.batches import BATCH, DRAFTED, REQUESTS, VOCABULARY, Batch
from tests.engine.stand_ins.interpreted import Outcome, assert_same, with_stand_ins_and_without

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
DTYPES = (torch.float32, torch.bfloat16)


def sampled_tokens(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    batch, outcome = Batch(generator), Outcome()
    for dtype in DTYPES:
        logits, positions = batch.random_logits(dtype), batch.integers(0, 2000, batch.rows)
        outcome[f"of the target, {dtype}"] = gumbel_sample(
            logits, batch.row_request, batch.temperature, batch.seeds, positions, False, False
        )
        outcome[f"of a draft, {dtype}"] = gumbel_sample(
            logits[:BATCH], batch.requests, batch.temperature, batch.seeds, positions[:BATCH], True, True
        )
    return outcome


def verified_tokens(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils

    batch, outcome = Batch(generator), Outcome()
    positions, _ = batch.prepared()
    ids, rows = batch.integers(0, VOCABULARY, 64).int(), batch.integers(0, batch.total, batch.rows)
    outcome["gathered"] = rejection_sampler.gather_draft_sampled(
        ids, positions, rows, batch.row_request, batch.row_place, batch.prompt
    )
    tokens, count = batch.integers(0, VOCABULARY, BATCH, DRAFTED + 1), batch.logits
    flat = torch.zeros(batch.rows, dtype=torch.int64)
    rejection_sampler._flatten_sampled_kernel[(BATCH,)](flat, tokens, tokens.stride(0), count, batch.first_logit)
    outcome["flat"] = flat
    for dtype in DTYPES:
        logits, at = batch.random_logits(dtype), batch.integers(0, 2000, batch.rows)
        for name, draft_logits in (
            ("all or nothing", None),
            ("drawn", 4 * batch.normal(REQUESTS, DRAFTED, VOCABULARY)),
        ):
            # The sampler's own call, by the module: tests exchange it there.
            tokens, count = rejection_sampler_utils.rejection_sample(
                logits, None if draft_logits is None else draft_logits.to(dtype), _likely_proposals(batch, logits),
                batch.first_logit, at, batch.requests, batch.row_request, batch.row_place, batch.temperature,
                batch.seeds, DRAFTED,
            )  # fmt: skip
            outcome[f"{name}, {dtype}"] = [count, *(row[:many] for row, many in zip(tokens, count, strict=True))]
    return outcome


def logprobs(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    batch, outcome = Batch(generator), Outcome()
    for dtype in DTYPES:
        logits = (4 * batch.normal(batch.rows, VOCABULARY)).to(dtype)
        scores = compute_topk_scores(logits, 3, batch.integers(0, VOCABULARY, batch.rows))
        outcome[str(dtype)] = scores.logprobs
        if dtype is torch.float32:  # the interpreter compares bfloat16 by their bits
            outcome["ranks"] = scores.selected_token_ranks
    return outcome


def chosen_logprobs(generator: torch.Generator) -> Outcome:
    """Some requests name the tokens whose log-probabilities they want; the first have nothing to say about theirs."""
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
    from vllm.v1.worker.gpu.sample.prompt_logprob import get_prompt_logprobs_token_ids

    batch = Batch(generator)
    state = SimpleNamespace(
        num_token_ids=SimpleNamespace(gpu=batch.integers(0, 3, REQUESTS).int()),
        token_ids=SimpleNamespace(gpu=batch.integers(0, VOCABULARY, REQUESTS, 8).int()),
    )
    outcome: Outcome = {}
    for count in (0, 2):
        scores = compute_topk_scores(
            4 * batch.normal(batch.rows, VOCABULARY), count, batch.integers(0, VOCABULARY, batch.rows), None, state,
            batch.row_request, 3,
        )  # fmt: skip
        outcome[f"{count} likeliest"] = [scores.logprob_token_ids, scores.logprobs, scores.selected_token_ranks]
    outcome["of the prompt"] = get_prompt_logprobs_token_ids(
        batch.total, batch.first_token, batch.requests, batch.computed, batch.text
    )
    return outcome


def _likely_proposals(batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """Half of them near the target's own choice, so that some stand; one place without a proposal."""
    proposals = batch.integers(0, VOCABULARY, batch.rows).int()
    for row in range(1, batch.rows):
        if batch.row_place[row] > 0 and batch.integers(0, 2, 1):
            proposals[row] = int((logits[row - 1].float() + 0.5 * batch.normal(VOCABULARY)).argmax())
    if batch.rows > 2 and batch.integers(0, 3, 1) == 0:
        proposals[batch.rows // 2] = -1
    return proposals


CASES = (sampled_tokens, verified_tokens, logprobs, chosen_logprobs)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_tokens_are_those_of_the_kernels(case, seed):
    """Promise: what is sampled, accepted and reported on a CPU is what the kernels give for the same seeds."""
    assert_same(*with_stand_ins_and_without(case, seed))


def test_bfloat16_logits_are_ranked_as_in_float32():
    """Promise: a token's rank does not depend on how wide the logits are."""
    from outrider_cpu import logprobs as ours

    batch = Batch(torch.Generator().manual_seed(0))
    logits, tokens = batch.random_logits(torch.bfloat16), batch.integers(0, VOCABULARY, batch.rows)
    narrow, wide = (torch.empty(batch.rows, dtype=torch.int64) for _ in range(2))
    ours.ranks(narrow, logits, tokens)
    ours.ranks(wide, logits.float(), tokens)
    assert torch.equal(narrow, wide)
