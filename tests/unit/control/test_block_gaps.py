"""KV gaps: a block drafter's cannot be closed, and a draft model's has a price."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from outrider_runtime.control import acceptance
from outrider_runtime.control.batch import NO_DRAFTER, Batch
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.draft_options import STEP_TOKENS
from outrider_runtime.control.plans import ExecutionMode, Purpose
from outrider_runtime.control.settings import Drafter, HotSettings, Mode, Settings
from outrider_runtime.control.step_times import DrafterCost, LatencyModel, StepCost

from tests.unit.control import columns

BLOCK = Drafter("block", needs_kv=True, needs_hidden=True)
MODEL = Drafter("model", passes=True, needs_kv=True)
GAP_TOKENS = 1 << 30
REQUESTS = 4


def controller(*pool: Drafter, **hot: Any) -> Controller:
    """A controller that knows its drafters: the block's tokens are accepted more often, and it costs no more."""
    target = StepCost(per_batched_token_s=2e-6, constant_s=8e-3)
    cost = DrafterCost(
        StepCost(per_batched_token_s=1e-6, constant_s=3e-4),
        first_pass=StepCost(per_batched_token_s=1e-7, constant_s=1e-5),
    )
    model = LatencyModel(
        dict.fromkeys(ExecutionMode, target),
        {member.name: replace(cost, autoregressive=member.passes) for member in pool},
    )
    loop = Controller(
        Settings(pool, 5, 64, hot=HotSettings(**({"max_draft_tokens": 5} | hot))), model, clock=time.perf_counter,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    known = loop._evidence.acceptance._known
    known.has_history[:] = True
    known.tried[:] = 100
    for number, member in enumerate(pool):
        known.accepted[number] = 95 if member.is_block else 90
    acceptance.refresh(known)
    return loop


def decoding(missing: np.ndarray) -> Batch:
    context, left = np.full(REQUESTS, 300), np.full(REQUESTS, 500)
    return columns.batch(
        REQUESTS, len(missing), context=context, left=left, emitted=np.full(REQUESTS, 5), missing=missing
    )


def test_draft_model_catches_up_where_a_block_drafter_cannot() -> None:
    """Bug: the block drafter counted as fed although it had a gap, so that the draft model was never chosen."""
    missing = np.full((2, REQUESTS), 300)
    missing[0] = GAP_TOKENS
    kv, fed = controller(BLOCK, MODEL)._propose._kv, np.zeros((2, REQUESTS), np.int64)
    for _ in range(16):
        _, catch_up_tokens = kv.choose(decoding(missing))
        fed = np.maximum(fed, catch_up_tokens)
    assert not fed[0].any()
    assert (fed[1] == 300).all()


@pytest.mark.parametrize(("missing", "earlier"), [(300, 0), (300, 200), (1000, 900)])
def test_gap_of_a_draft_model_is_priced_without_the_steps_prompt(missing: int, earlier: int) -> None:
    """Bug: a prompt that ends in the step was charged twice: in the first pass of the step's end, and as a gap."""
    prompt = [0, missing - earlier, 0, 0]
    batch = columns.batch(
        REQUESTS, prompt=prompt, missing=np.array([[1, missing, 1, 1]]), left=[400] * REQUESTS, emitted=[400] * REQUESTS
    )
    _, options = controller(MODEL)._propose._search.options(batch, 1.0)
    (price_s,) = options.catch_up_s
    assert price_s[[0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert price_s[1] == pytest.approx(earlier * (1e-6 + 1e-7) / (400 / STEP_TOKENS))


def test_request_with_a_block_gap_is_left_out() -> None:
    """The hidden states that would close it are gone. The other requests are drafted for."""
    missing = np.ones((1, REQUESTS), np.int64)
    missing[0, 0] = GAP_TOKENS
    choice, catch_up_tokens = controller(BLOCK)._propose._kv.choose(decoding(missing))
    assert choice.drafter_order[0].tolist() == [NO_DRAFTER] + [0] * (REQUESTS - 1)
    assert not catch_up_tokens.any()


def test_trial_leaves_out_requests_with_block_gaps() -> None:
    """Bug: in a trial a block drafter proposed junk over gaps, and the loop learned from that."""
    missing = np.ones((2, REQUESTS), np.int64)
    missing[1, : REQUESTS - 1] = GAP_TOKENS
    propose, batch = controller(MODEL, BLOCK)._propose, decoding(missing)
    plan = propose._plan_for_one(batch, 1, 1, Purpose.EXPLORE)
    assert plan.drafter_order[0].tolist() == [NO_DRAFTER] * (REQUESTS - 1) + [1]


def test_length_is_cut_to_the_block() -> None:
    """Bug: a block of 2 tokens was ordered 5, and the tokens beyond it were expected to be accepted."""
    two = replace(BLOCK, most_tokens=2)
    batch = decoding(np.ones((1, REQUESTS), np.int64))
    for loop in (controller(two), controller(two, mode=Mode.STATIC)):
        assert loop.plan_draft(batch).passes.tolist() == [2]
    _, pool = controller(two)._propose._search.options(batch)
    assert (pool.paths[0, :2] > 0).all()
    assert not pool.paths[0, 2:].any()


def test_block_drafter_obeys_a_lowered_limit() -> None:
    """Bug: the choice gave a block drafter its whole block, whatever `maxDraftTokens` said."""
    plan = controller(BLOCK, max_draft_tokens=2).plan_draft(decoding(np.ones((1, REQUESTS), np.int64)))
    assert plan.passes.tolist() == [2]
