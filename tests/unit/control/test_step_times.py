"""What a step costs: the profile's form, corrected online, target and drafters apart."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from outrider_runtime.control.cost.model import DrafterCost, LatencyModel, Shape, StepCost
from outrider_runtime.control.cost.observed_times import ROWS, Drafting, StepTimes, TargetRun, observe_times
from outrider_runtime.control.cost.step_times import asking_s, draft_columns, feeding_s, node_s
from outrider_runtime.control.cost.step_times import price as price_of
from outrider_runtime.control.data.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter, Settings

TARGET = StepCost(1e-8, 4e-5, 1e-4, 64.0, constant_s=0.01)
PASS = DrafterCost(StepCost(per_batched_token_s=4e-6, constant_s=1e-3))
EAGLE = Drafter("eagle", passes=True, needs_hidden=True)


def latency(target=TARGET, *, graph=None, ragged=TARGET, beyond=TARGET, drafters=True) -> StepTimes:
    modes = {ExecutionMode.UNIFORM: target, ExecutionMode.RAGGED: ragged, ExecutionMode.BEYOND_GRAPH: beyond}
    settings = Settings((EAGLE,), 5, 16, largest_graph_tokens=graph)
    return StepTimes(LatencyModel(modes, {"eagle": PASS} if drafters else {}), settings)


def decoding(requests: int, context: int = 1000) -> Shape:
    return Shape(*map(float, (requests * context, requests, requests, requests * context / 1000)))


def price(one: StepTimes, requests: int, most: int = 100, *, verify: int | None = None, fresh_prompts: float = 0.0):
    """Of decoding requests, `verify` of which may have proposals: all, unless it says otherwise."""
    context = np.zeros(requests if verify is None else verify, np.int64)
    extra_s = node_s(one.costs, context, 0.0)
    return price_of(one.costs, decoding(requests), extra_s, 1.0, most, fresh_prompts, len(context) == requests)


def draft_s(one: StepTimes, requests: int, passes: int) -> float:
    first_s, pass_s, _ = draft_columns(one.costs, np.full(requests, 1000), 0.0, 1)
    return float(first_s[0] + (passes - 1) * pass_s[0, 0])


def observe(
    one: StepTimes, shape: Shape, seconds: float, *, mode=ExecutionMode.UNIFORM, verified=0, draft_s=math.nan
) -> bool:  # fmt: skip
    """Whether the times of a step of 8 requests of 1000 tokens are believed; a draft of three passes at its end, where
    it has a time."""
    plan = drafting(8, 3, draft_s)
    plain = observe_times(one.costs, one.beliefs, TargetRun(ROWS[mode], shape, verified, seconds), plan)
    return not math.isnan(plain.decode_s)


def drafting(requests: int, passes: int, seconds: float) -> Drafting:
    """One drafter that is fed a token of each request."""
    once = np.ones((1, requests), np.int64)
    return Drafting(once, once - 1, np.array([passes]), once[0, :1], np.full(requests, 1000), np.array([seconds]))


def test_what_a_draft_is_fed_of_a_prompt_costs_what_tokens_beyond_its_knee_cost():
    """A token alone is below the knee, a prompt is not."""
    passes = DrafterCost(
        StepCost(per_batched_token_s=2e-6, per_batched_token_above_knee_s=8e-6, knee_tokens=64, constant_s=1e-3)
    )
    draft = Drafter("draft", passes=True, needs_kv=True)
    one = StepTimes(LatencyModel(dict.fromkeys(ExecutionMode, TARGET), {"draft": passes}), Settings((draft,), 5, 16))
    fed_s = feeding_s(one.costs, np.array([[0, 20, 300]]), 40.0)[0]
    expected = [
        passes.seconds(Shape(0, 40 + tokens, 40, 0), 1) - passes.seconds(Shape(0, 40, 40, 0), 1)
        for tokens in (0, 20, 300)
    ]
    assert fed_s == pytest.approx(expected)


def test_a_step_costs_what_the_profile_says_across_the_knee():
    """a*N_context + g1*N_batched + g2*max(0, N_batched - knee) + d, for every number of proposals."""
    found = price(latency(), 32).varlen_s
    expected = [TARGET.seconds(Shape(32_000, 32 + more, 32, 32)) for more in range(101)]
    assert found == pytest.approx(np.array(expected))


def test_past_the_largest_graph_other_coefficients_hold():
    slow = StepCost(per_batched_token_s=4e-5, constant_s=0.02)
    found = price(latency(graph=48, beyond=slow), 32).varlen_s
    assert found[16] == pytest.approx(TARGET.seconds(decoding(32)) + 16 * 4e-5)
    assert found[17] == pytest.approx(0.02 + 49 * 4e-5)


IN_PIECES = dataclasses.replace(TARGET, constant_s=0.014)


def test_one_request_alone_is_even_whatever_it_verifies():
    found = price(latency(ragged=IN_PIECES), 1)
    assert found.varlen_s[:6] == pytest.approx([TARGET.seconds(decoding(1)) + k * 4e-5 for k in range(6)])
    assert found.uniform_s == pytest.approx(found.varlen_s)


def test_no_step_with_proposals_is_even_where_a_request_can_have_none():
    found = price(latency(ragged=IN_PIECES), 32, verify=31)
    assert found.uniform_s[1:] == pytest.approx(found.varlen_s[1:])
    assert found.plain_s == pytest.approx(TARGET.seconds(decoding(32)))


def test_a_step_that_fresh_prompts_may_join_is_as_likely_ragged():
    found = price(latency(ragged=IN_PIECES), 32, fresh_prompts=0.25)
    assert found.uniform_s == pytest.approx(price(latency(), 32).uniform_s + 0.25 * 0.004)
    assert found.varlen_s[1:] == pytest.approx(price(latency(), 32).varlen_s[1:] + 0.004)
    assert found.plain_s == found.uniform_s[0] == found.varlen_s[0]


@pytest.mark.parametrize(("fresh", "two_or_more"), [(0.0, 0.0), (0.5, 0.5 - 0.5 * math.log(2)), (1.0, 1.0)])
def test_of_ragged_steps_lambda_counts_what_does_not_grow_with_their_tokens(fresh, two_or_more):
    found = price(latency(ragged=IN_PIECES), 32, fresh_prompts=fresh)
    assert 32 / found.rate == pytest.approx(TARGET.seconds(decoding(32)) + two_or_more * 0.004)


def test_a_device_that_is_slower_than_profiled_is_believed_target_and_draft_apart():
    one = latency()
    for _ in range(200):
        observe(one, decoding(8), 2 * TARGET.seconds(decoding(8)))
    assert price(one, 8).plain_s == pytest.approx(2 * TARGET.seconds(decoding(8)), rel=0.05)
    assert draft_s(one, 8, 3) == pytest.approx(PASS.seconds(decoding(8), 3))
    for _ in range(60):
        observe(one, decoding(8), 2 * TARGET.seconds(decoding(8)), draft_s=3 * PASS.seconds(decoding(8), 3))
    assert draft_s(one, 8, 3) == pytest.approx(3 * PASS.seconds(decoding(8), 3), rel=0.05)


@pytest.mark.parametrize("seconds", [math.nan, -1.0, 0.0, 3600.0, math.inf])
def test_absurd_times_are_dropped(seconds):
    one = latency()
    plain_s = TARGET.seconds(decoding(8))
    assert not observe(one, decoding(8), seconds)
    assert observe(one, decoding(8), plain_s, draft_s=seconds) is not (seconds > 0)
    assert price(one, 8).plain_s == pytest.approx(TARGET.seconds(decoding(8)))


def test_a_draft_that_takes_seconds_is_believed_when_it_goes_on():
    """Bug: of a drafter that took over a second a call, where the profile said milliseconds, nothing was ever learned,
    and each of its steps was dropped."""
    one, plain_s = latency(), TARGET.seconds(decoding(8))
    believed = [observe(one, decoding(8), plain_s, draft_s=1.5) for _ in range(120)]
    assert not any(believed[:8])
    assert all(believed[8:])
    assert draft_s(one, 8, 3) == pytest.approx(1.5, rel=0.1)
    assert price(one, 8).plain_s == pytest.approx(plain_s)


def test_a_drafter_without_a_profile_is_taken_for_a_share_of_the_target():
    assert 0 < draft_s(latency(drafters=False), 8, 1) < TARGET.seconds(decoding(8))


def test_passes_of_those_who_ask_cost_what_a_step_of_them_costs():
    """Bug: what tokens cost above the knee was nobody's, and passes over a large batch looked free."""
    one = StepTimes(
        LatencyModel(dict.fromkeys(ExecutionMode, TARGET), {}),
        Settings((Drafter("self", passes=True, kv_budget=512),), 4, 128),
    )
    for requests in (4, 64):
        context = np.full(requests, 8000)
        each_s = asking_s(one.costs, context)[0].sum() + draft_columns(one.costs, context, 0.0, 1)[1][0, 0]
        shape = Shape(512.0 * requests, requests, requests, 0.512 * requests)
        assert each_s == pytest.approx(TARGET.seconds(shape), rel=0.02)


def test_a_draft_model_over_a_window_costs_what_its_window_holds():
    """Bug: it is fed like any draft model, and was priced as the target itself, by requests that ask."""
    draft = StepCost(per_context_token_s=1e-6, per_batched_token_s=1e-5, constant_s=1e-3)
    known = LatencyModel(dict.fromkeys(ExecutionMode, TARGET), {"small": DrafterCost(draft, True)})
    small = Drafter("small", passes=True, needs_kv=True, kv_budget=512)
    one = StepTimes(known, Settings((small,), 4, 128))
    context = np.array([100, 400, 8000, 32_000])
    assert not asking_s(one.costs, context).size
    first_s, pass_s, token_s = draft_columns(one.costs, context, 0.0, 1)
    assert pass_s[0, 0] == pytest.approx(1e-3 + 4e-5 + 1e-6 * (100 + 400 + 512 + 512))
    assert first_s[0] == pytest.approx(pass_s[0, 0])
    assert token_s[0] == pytest.approx(1e-5)


def test_feeding_a_block_drafter_has_a_price_of_its_own() -> None:
    """A fed-only step that takes what feeding is profiled at says nothing of the pass; asking costs the pass alone."""
    cost = DrafterCost(StepCost(constant_s=2e-3), False, StepCost(constant_s=1e-4))
    settings = Settings((Drafter("block", needs_kv=True, needs_hidden=True),), 5, 16)
    block = StepTimes(LatencyModel({ExecutionMode.RAGGED: TARGET}, {"block": cost}), settings)
    target_s = TARGET.seconds(decoding(2))
    for passes, seconds in ((0, 1e-4), (3, 2.1e-3)):
        run = TargetRun(ROWS[ExecutionMode.RAGGED], decoding(2), 0, target_s)
        observe_times(block.costs, block.beliefs, run, drafting(2, passes, seconds))
        first_s, _, each_s = draft_columns(block.costs, np.full(2, 1000), 0.0, 1)
        assert first_s[0] == pytest.approx(2e-3)
        assert each_s[0] == 0.0
