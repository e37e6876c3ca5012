"""A step's bookkeeping by our stand-ins is that of vLLM's kernels: on CPUs it serves in their place."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from tests.engine.stand_ins.batches import BATCH, DRAFTED, LENGTH, REQUESTS, VOCABULARY, Batch
from tests.engine.stand_ins.interpreted import Outcome, assert_same, with_stand_ins_and_without

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


def inputs_of_the_target(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu import input_batch

    batch = Batch(generator)
    ids, ahead = torch.zeros(64, dtype=torch.int32), torch.zeros(2, REQUESTS, dtype=torch.int32)
    input_batch.prepare_prefill_inputs(
        ids, ahead, batch.requests, batch.first_token, batch.text, batch.prompt, batch.computed
    )
    positions, lengths = batch.prepared()
    drafts = batch.integers(0, VOCABULARY, REQUESTS, DRAFTED)
    rows = input_batch.combine_sampled_and_draft_tokens(
        ids, batch.requests, batch.last_sampled, batch.first_token, lengths, batch.prompt, drafts, batch.first_logit,
        batch.rows,
    )  # fmt: skip
    expanded = input_batch.expand_idx_mapping(batch.requests, batch.rows, batch.first_logit, DRAFTED + 1)
    return {"ids": ids, "ahead": ahead, "positions": positions, "lengths": lengths, "rows": rows, "expanded": expanded}


def states_after_a_step(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu import input_batch

    batch = Batch(generator)
    _, lengths = batch.prepared()
    count, _ = batch.sampled()
    count, rejected = input_batch.get_num_sampled_and_rejected(
        count, lengths, batch.first_logit, batch.requests, batch.prompt
    )
    counts_of_tokens = torch.zeros(REQUESTS, VOCABULARY, dtype=torch.int32)
    tokens = batch.integers(0, VOCABULARY, BATCH, DRAFTED + 1)
    total = (batch.prompt + 3).int()
    states = batch.computed.clone(), batch.last_sampled, counts_of_tokens, batch.text, total
    computed, last, by_token, text, total = states
    input_batch.post_update(
        batch.requests, computed, last, by_token, tokens, count, rejected, batch.first_token, text, total
    )
    input_batch.post_update(batch.requests, computed, last, None, tokens, count, rejected, None, text, total)
    input_batch.post_update_num_computed_tokens(batch.requests, computed, batch.first_token)
    return {"states": states, "count": count, "rejected": rejected}


def block_tables(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu.block_table import BlockTables

    batch = Batch(generator)
    positions, _ = batch.prepared()
    masks = "num_computed_tokens" in inspect.signature(BlockTables.gather_block_tables).parameters
    outcome: Outcome = {}
    for sizes in ([16], [16, 32]):
        reach = {"sliding_window_reach": [40, 0][: len(sizes)]} if masks else {}
        tables = BlockTables(sizes, REQUESTS, 64, [20] * len(sizes), torch.device("cpu"), **reach)
        for request in range(REQUESTS):
            blocks = tuple(batch.integers(0, 99, 18).tolist() for _ in sizes)
            tables.append_block_ids(request, blocks, True)
        tables.apply_staged_writes()
        masked = {"num_computed_tokens": batch.computed} if masks else {}
        rows = [table.clone() for table in tables.gather_block_tables(batch.requests, BATCH + 1, **masked)]
        slots = tables.compute_slot_mappings(batch.requests, batch.first_token, positions, batch.total)
        outcome[f"{len(sizes)} groups"] = [*rows, slots.clone()]
    return outcome


def inputs_of_a_head(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    batch, buffers = Batch(generator), _buffers()
    positions, lengths = batch.prepared()
    count, rejected = batch.sampled()
    ids, ahead = batch.integers(0, VOCABULARY, 64).int(), batch.integers(0, VOCABULARY, REQUESTS).int()
    last, step = torch.ones(REQUESTS, dtype=torch.int64), torch.tensor(7)
    target = batch.as_input_batch(ids, positions, lengths)
    speculator.prepare_prefill_inputs(last, step, buffers, target, count, rejected, batch.last_sampled, ahead, REQUESTS)
    outcome: Outcome = {"first pass": [last.clone(), step.clone(), *_copies(buffers)]}
    noise, drafts = batch.integers(0, 50, REQUESTS), batch.integers(0, VOCABULARY, REQUESTS, DRAFTED)
    speculator.prepare_decode_inputs(drafts[:BATCH, 0], lengths[:BATCH], rejected, buffers, noise, LENGTH, REQUESTS)
    outcome["second pass"] = [noise.clone(), *_copies(buffers)]
    kept = torch.zeros(REQUESTS, DRAFTED, dtype=torch.int64)
    hidden, seen = torch.zeros(REQUESTS, 16), batch.normal(REQUESTS, 16)
    for number in range(1, DRAFTED):
        speculator.update_draft_inputs(
            batch.integers(0, VOCABULARY, BATCH), torch.tensor(number), seen[:BATCH], kept, hidden, buffers, noise,
            BATCH, LENGTH, DRAFTED,
        )  # fmt: skip
    outcome["other passes"] = [kept, hidden, noise, *_copies(buffers)]
    return outcome


def inputs_of_a_draft_model(generator: torch.Generator) -> Outcome:
    from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator

    batch, buffers = Batch(generator), _buffers()
    positions, lengths = batch.prepared()
    _, rejected = batch.sampled()
    ids = batch.integers(0, VOCABULARY, 64).int()
    out_ids, out_positions = torch.zeros(96, dtype=torch.int32), torch.zeros(96, dtype=torch.int64)
    last, limit = torch.ones(REQUESTS, dtype=torch.int64), 60
    target = batch.as_input_batch(ids, positions, lengths)
    speculator.prepare_prefill_inputs(
        buffers, target, batch.last_sampled, rejected, out_ids, out_positions, last, REQUESTS, limit
    )
    return {"ids": out_ids, "positions": out_positions, "last": last, "buffers": _copies(buffers)}


def _buffers() -> SimpleNamespace:
    return SimpleNamespace(
        input_ids=torch.zeros(96, dtype=torch.int32),
        positions=torch.zeros(96, dtype=torch.int64),
        query_start_loc=torch.zeros(REQUESTS + 1, dtype=torch.int32),
        seq_lens=torch.ones(REQUESTS, dtype=torch.int32),
    )


def _copies(buffers: SimpleNamespace) -> list[torch.Tensor]:
    return [table.clone() for table in vars(buffers).values()]


CASES = (
    inputs_of_the_target,
    states_after_a_step,
    block_tables,
    inputs_of_a_head,
    inputs_of_a_draft_model,
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_step_is_prepared_as_vllm_prepares_it(case, seed):
    """Promise: a request is fed the same tokens, positions and slots as on a GPU."""
    assert_same(*with_stand_ins_and_without(case, seed))
