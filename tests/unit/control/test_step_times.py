"""Step times: the profile's equation, corrected online, separately for target and drafters."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from outrider_runtime.control.observed_times import ROWS, Drafting, StepTimes, TargetRun, observe_times
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter, Settings
from outrider_runtime.control.step_times import (
    DrafterCost,
    LatencyModel,
    Shape,
    StepCost,
    draft_columns,
    feeding_s,
    node_s,
    use_s,
)
from outrider_runtime.control.step_times import price as price_of

TARGET = StepCost(1e-8, 4e-5, 1e-4, 64.0, constant_s=0.01)
PASS = DrafterCost(StepCost(per_batched_token_s=4e-6, constant_s=1e-3))
EAGLE = Drafter("eagle", passes=True, needs_hidden=True)


def latency(target=TARGET, *, graph=None, varlen=TARGET, beyond=TARGET, drafters=True) -> StepTimes:
    modes = {ExecutionMode.UNIFORM: target, ExecutionMode.VARLEN: varlen, ExecutionMode.BEYOND_GRAPH: beyond}
    settings = Settings((EAGLE,), 5, 16, largest_graph_tokens=graph)
    return StepTimes(LatencyModel(modes, {"eagle": PASS} if drafters else {}), settings)


def decoding(requests: int, context: int = 1000) -> Shape:
    return Shape(*map(float, (requests * context, requests, requests, requests * context / 1000)))


def price(times: StepTimes, requests: int, most: int = 100):
    """Prices of a step of decoding requests."""
    extra_s = node_s(times.costs, np.zeros(requests, np.int64), 0.0)
    return price_of(times.costs, decoding(requests), extra_s, 1.0, most)


def draft_s(times: StepTimes, requests: int, passes: int) -> float:
    first_s, pass_s, _ = draft_columns(times.costs, np.full(requests, 1000), 0.0, 1)
    return float(first_s[0] + (passes - 1) * pass_s[0, 0])


def observe(
    times: StepTimes, shape: Shape, seconds: float, *, mode=ExecutionMode.UNIFORM, verified=0, draft_s=math.nan
) -> bool:  # fmt: skip
    """Observe a step of 8 requests of 1000 tokens, with a draft of three passes at its end if `draft_s` is a number.
    Returns whether its times are believed."""
    plan = drafting(8, 3, draft_s)
    plain = observe_times(times.costs, times.beliefs, TargetRun(ROWS[mode], shape, verified, seconds), plan)
    return not math.isnan(plain.decode_s)


def drafting(requests: int, passes: int, seconds: float) -> Drafting:
    """The work of one drafter that is fed a token of each request."""
    once = np.ones((1, requests), np.int64)
    return Drafting(once, once - 1, np.array([passes]), once[0, :1], np.full(requests, 1000), np.array([seconds]))


def test_feeding_a_prompt_is_priced_with_the_knee():
    """A single token is below the knee; a prompt is not."""
    passes = DrafterCost(
        StepCost(per_batched_token_s=2e-6, per_batched_token_above_knee_s=8e-6, knee_tokens=64, constant_s=1e-3)
    )
    draft = Drafter("draft", passes=True, needs_kv=True)
    times = StepTimes(LatencyModel(dict.fromkeys(ExecutionMode, TARGET), {"draft": passes}), Settings((draft,), 5, 16))
    fed_s = [feeding_s(times.costs, 0, tokens, 40.0) for tokens in (0.0, 20.0, 300.0)]
    expected = [
        passes.seconds(Shape(0, 40 + tokens, 40, 0), 1) - passes.seconds(Shape(0, 40, 40, 0), 1)
        for tokens in (0, 20, 300)
    ]
    assert fed_s == pytest.approx(expected)


@pytest.mark.parametrize(
    "draft", [Drafter("d", passes=True, needs_kv=True), Drafter("d", passes=True, needs_hidden=True)]
)
def test_drafter_that_reads_is_charged_for_the_steps_prompts(draft: Drafter) -> None:
    """Bug: a draft model that runs reads its step's prompts, as a head does, but was chosen as if it did not. On an
    A100 at 190 requests that was half of its time, and 9% of goodput."""
    passes = DrafterCost(StepCost(per_batched_token_s=1e-5, constant_s=1e-3))
    times = StepTimes(LatencyModel(dict.fromkeys(ExecutionMode, TARGET), {"d": passes}), Settings((draft,), 5, 16))
    context = np.full(4, 1000)
    without, with_prompts = (draft_columns(times.costs, context, tokens, 1)[0][0] for tokens in (0.0, 300.0))
    assert with_prompts - without == pytest.approx(300 * 1e-5)


def test_price_follows_the_profile_across_the_knee():
    """a*N_context + g1*N_batched + g2*max(0, N_batched - knee) + d, for every number of proposals."""
    prices = price(latency(), 32).target_s
    expected = [TARGET.seconds(Shape(32_000, 32 + more, 32, 32)) for more in range(101)]
    assert prices == pytest.approx(np.array(expected))


def test_price_past_the_largest_graph_uses_other_coefficients():
    slow = StepCost(per_batched_token_s=4e-5, constant_s=0.02)
    prices = price(latency(graph=48, beyond=slow), 32).target_s
    assert prices[16] == pytest.approx(TARGET.seconds(decoding(32)) + 16 * 4e-5)
    assert prices[17] == pytest.approx(0.02 + 49 * 4e-5)


IN_PIECES = dataclasses.replace(TARGET, constant_s=0.014)


def test_step_of_one_request_is_always_uniform():
    prices = price(latency(varlen=IN_PIECES), 1)
    assert prices.target_s[:6] == pytest.approx([TARGET.seconds(decoding(1)) + k * 4e-5 for k in range(6)])


def test_step_with_proposals_is_priced_as_varlen():
    prices = price(latency(varlen=IN_PIECES), 32)
    assert prices.plain_s == pytest.approx(TARGET.seconds(decoding(32)))
    assert prices.target_s[1:] == pytest.approx(price(latency(), 32).target_s[1:] + 0.004)
    assert prices.rate == pytest.approx(32 / TARGET.seconds(decoding(32)))


def test_slow_device_corrects_target_and_draft_separately():
    times = latency()
    for _ in range(200):
        observe(times, decoding(8), 2 * TARGET.seconds(decoding(8)))
    assert price(times, 8).plain_s == pytest.approx(2 * TARGET.seconds(decoding(8)), rel=0.05)
    assert draft_s(times, 8, 3) == pytest.approx(PASS.seconds(decoding(8), 3))
    for _ in range(60):
        observe(times, decoding(8), 2 * TARGET.seconds(decoding(8)), draft_s=3 * PASS.seconds(decoding(8), 3))
    assert draft_s(times, 8, 3) == pytest.approx(3 * PASS.seconds(decoding(8), 3), rel=0.05)


@pytest.mark.parametrize("seconds", [math.nan, -1.0, 0.0, 3600.0, math.inf])
def test_absurd_times_are_dropped(seconds):
    times = latency()
    plain_s = TARGET.seconds(decoding(8))
    assert not observe(times, decoding(8), seconds)
    assert observe(times, decoding(8), plain_s, draft_s=seconds) is not (seconds > 0)
    assert price(times, 8).plain_s == pytest.approx(TARGET.seconds(decoding(8)))


def test_very_slow_draft_is_believed_after_eight_steps():
    """Bug: if a drafter's call took over a second and the profile said milliseconds, nothing was ever learned, and each
    of its steps was dropped."""
    times, plain_s = latency(), TARGET.seconds(decoding(8))
    believed = [observe(times, decoding(8), plain_s, draft_s=1.5) for _ in range(120)]
    assert not any(believed[:8])
    assert all(believed[8:])
    assert draft_s(times, 8, 3) == pytest.approx(1.5, rel=0.1)
    assert price(times, 8).plain_s == pytest.approx(plain_s)


@pytest.mark.parametrize(
    ("prompt", "warm_up_s"), [(500, 2.0), (8192, 0.0), (8192, 10.0)], ids=["warm-up", "long prompt", "both"]
)
def test_first_pass_does_not_spoil_what_is_learned_after_it(prompt, warm_up_s):
    """Bug: without a profile the first pass gave the only guess. After a slow one, or a long prompt, prices were wrong
    by half and more for a thousand steps."""
    times, rng = StepTimes(None, Settings((EAGLE,), 5, 16)), np.random.default_rng(0)
    first = Shape(0.0, float(prompt), 1.0, 0.0, float(prompt))
    learn(times, first, TARGET.seconds(first) + warm_up_s)
    for _ in range(200):
        shape = decoding(int(rng.integers(1, 17)))
        learn(times, shape, TARGET.seconds(shape) * rng.lognormal(sigma=0.03))
    assert price(times, 8).plain_s == pytest.approx(TARGET.seconds(decoding(8)), rel=0.1)
    assert np.diff(price(times, 8).target_s[1:9]) == pytest.approx(4e-5, abs=8e-5)


def learn(times: StepTimes, shape: Shape, seconds: float) -> None:
    run = TargetRun(ROWS[ExecutionMode.VARLEN], shape, 0, seconds)
    times.learn(run)
    observe_times(times.costs, times.beliefs, run, drafting(8, 3, math.nan))


def test_unprofiled_drafter_costs_a_share_of_the_target():
    assert 0 < draft_s(latency(drafters=False), 8, 1) < TARGET.seconds(decoding(8))


def test_self_drafting_passes_cost_a_step_of_their_requests():
    """Bug: no request was charged for tokens above the knee, and passes over a large batch looked free."""
    times = StepTimes(
        LatencyModel(dict.fromkeys(ExecutionMode, TARGET), {}),
        Settings((Drafter("self", passes=True, kv_budget=512),), 4, 128),
    )
    for requests in (4, 64):
        context = np.full(requests, 8000)
        seconds_of_all = use_s(times.costs, context)[0].sum() + draft_columns(times.costs, context, 0.0, 1)[1][0, 0]
        shape = Shape(512.0 * requests, requests, requests, 0.512 * requests)
        assert seconds_of_all == pytest.approx(TARGET.seconds(shape), rel=0.02)


def test_draft_model_with_a_window_is_priced_by_its_window():
    """Bug: it is fed like any draft model, but was priced like the target itself, for each request that uses it."""
    draft = StepCost(per_context_token_s=1e-6, per_batched_token_s=1e-5, constant_s=1e-3)
    known = LatencyModel(dict.fromkeys(ExecutionMode, TARGET), {"small": DrafterCost(draft, True)})
    small = Drafter("small", passes=True, needs_kv=True, kv_budget=512)
    times = StepTimes(known, Settings((small,), 4, 128))
    context = np.array([100, 400, 8000, 32_000])
    assert not use_s(times.costs, context).size
    first_s, pass_s, token_s = draft_columns(times.costs, context, 0.0, 1)
    assert pass_s[0, 0] == pytest.approx(1e-3 + 4e-5 + 1e-6 * (100 + 400 + 512 + 512))
    assert first_s[0] == pytest.approx(pass_s[0, 0])
    assert token_s[0] == pytest.approx(1e-5)


def test_feeding_a_block_drafter_has_its_own_price() -> None:
    """A step that only feeds it says nothing about the time of its pass; proposing costs the pass alone."""
    cost = DrafterCost(StepCost(constant_s=2e-3), False, StepCost(constant_s=1e-4))
    settings = Settings((Drafter("block", needs_kv=True, needs_hidden=True),), 5, 16)
    block = StepTimes(LatencyModel({ExecutionMode.VARLEN: TARGET}, {"block": cost}), settings)
    target_s = TARGET.seconds(decoding(2))
    for passes, seconds in ((0, 1e-4), (3, 2.1e-3)):
        run = TargetRun(ROWS[ExecutionMode.VARLEN], decoding(2), 0, target_s)
        observe_times(block.costs, block.beliefs, run, drafting(2, passes, seconds))
        first_s, _, token_s = draft_columns(block.costs, np.full(2, 1000), 0.0, 1)
        assert first_s[0] == pytest.approx(2e-3)
        assert token_s[0] == 0.0
