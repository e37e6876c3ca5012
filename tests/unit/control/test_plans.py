"""Whatever the batch, a plan stays within what the engine can run, and does what the settings say."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.batch import (
    Batch,
    DraftPlan,
    ExecutionMode,
    Purpose,
    RequestOutcome,
    RequestView,
    StepOutcome,
    VerifyPlan,
)
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.costs import DrafterCost, LatencyModel, StepCost
from outrider_runtime.control.counters import Reason
from outrider_runtime.control.settings import DrafterSpec, DraftPrefill, HotSettings, Mode, Settings

# Memory-bound: a further token is nearly free, so speculation always pays here.
CHEAP = StepCost(per_batched_token_s=1e-5, constant_s=0.02)
POOL = (DrafterSpec("lookup", neural=False), DrafterSpec("eagle", neural=True))
MAX = 4


def controller(pool: tuple[DrafterSpec, ...] = POOL, target: StepCost = CHEAP, **hot: object) -> Controller:
    costs = {
        "eagle": DrafterCost(StepCost(constant_s=5e-4)),
        "lookup": DrafterCost(StepCost(constant_s=1e-4), autoregressive=False),
    }
    latency = LatencyModel(dict.fromkeys(ExecutionMode, target), costs)
    made = Settings(pool, MAX, hot=HotSettings(max_draft_tokens=MAX, **hot))  # type: ignore[arg-type]
    ticks = itertools.count()
    return Controller(made, latency, clock=lambda: next(ticks) * 1e-6, rng=np.random.default_rng(0))


def view(number: int = 0, **fields: object) -> RequestView:
    values: dict[str, object] = {
        "id": f"r{number}", "slo_class": None, "context_tokens": 100, "prefill_tokens": 0, "prefill_left": 0,
        "output_tokens": 5, "remaining_tokens": 50, "elapsed_s": 1.0, "draft_ready": True,
    }  # fmt: skip
    return RequestView(**{**values, **fields})  # type: ignore[arg-type]


def batch(*views: RequestView, budget: int = 2048, kv: int = 10_000) -> Batch:
    return Batch(views, now=1.0, token_budget=budget, free_kv_tokens=kv)


VIEWS = st.builds(
    view,
    number=st.integers(0, 10**6),
    slo_class=st.sampled_from([None, "chat"]),
    context_tokens=st.integers(0, 3000),
    prefill_tokens=st.sampled_from([0, 0, 0, 17, 300]),
    prefill_left=st.sampled_from([0, 0, 0, 40]),
    remaining_tokens=st.integers(0, 8),
    proposed=st.integers(0, MAX),
    drafter=st.sampled_from([None, "lookup", "eagle", "gone"]),
    draft_ready=st.booleans(),
)


@settings(max_examples=70, deadline=None)
@given(st.lists(VIEWS, max_size=6), st.integers(0, 60), st.integers(0, 30), st.sampled_from(list(Mode)))
def test_no_plan_exceeds_the_step_the_memory_or_the_request(views, budget, kv, mode):
    """Budgets, KV memory and remaining tokens hold in every mode, also for batches that make no sense."""
    loop = controller(mode=mode)
    made = batch(*views, budget=budget, kv=kv)
    loop.plan_draft(made)  # sets the purpose of what is verified next
    verify = loop.plan_verify(made)
    assert len(verify.lengths) == len(views)
    for length, each in zip(verify.lengths, views, strict=True):
        assert 0 <= length <= max(0, min(each.proposed, each.remaining_tokens - 1))
    decoding = sum(each.prefill_tokens == each.prefill_left == 0 for each in views)
    assert sum(verify.lengths) <= max(0, min(budget, kv) - decoding)
    draft = loop.plan_draft(made)
    assert 0 <= draft.draft_tokens <= MAX
    assert len(draft.drafters) == len(views)
    assert 0 <= draft.neural_tokens <= draft.draft_tokens
    assert any(draft.drafters) == (draft.draft_tokens > 0)
    for name, each in zip(draft.drafters, views, strict=True):
        if name is not None:
            assert draft.draft_tokens > 0
            assert each.prefill_left == 0
            assert each.remaining_tokens > 2
            assert name != "eagle" or (each.draft_ready and draft.run_neural)
    assert draft.run_neural or not draft.prefill_draft


def test_off_speculates_nowhere_and_runs_no_draft():
    """mode: Off takes effect at the next step; proposals in flight are not verified."""
    loop = controller()
    loop.configure(HotSettings(mode=Mode.OFF, max_draft_tokens=MAX))
    made = batch(view(0, proposed=3, drafter="eagle"), view(1, prefill_tokens=40))
    assert loop.plan_verify(made).lengths == (0, 0)
    assert loop.plan_draft(made) == DraftPlan(0, (None, None), False, False, 0, Purpose.FIXED)
    assert loop.snapshot().reason is Reason.OFF


def test_static_always_proposes_the_full_length_with_the_first_drafter():
    """mode: Static: maxDraftTokens, and everything that was proposed is verified."""
    loop = controller(mode=Mode.STATIC)
    plan = loop.plan_draft(batch(view(0), view(1, remaining_tokens=2)))
    assert (plan.draft_tokens, plan.drafters) == (MAX, ("lookup", None))
    verify = loop.plan_verify(batch(view(0, proposed=MAX, drafter="lookup"), view(1)))
    assert verify.lengths == (MAX, 0)


def test_a_lower_hot_limit_holds_from_the_next_step():
    """maxDraftTokens may be lowered without a restart; above the value at boot it counts as that."""
    loop = controller(mode=Mode.STATIC)
    loop.configure(HotSettings(mode=Mode.STATIC, max_draft_tokens=2))
    assert loop.plan_draft(batch(view())).draft_tokens == 2
    loop.configure(HotSettings(mode=Mode.STATIC, max_draft_tokens=99))
    assert loop.plan_draft(batch(view())).draft_tokens == MAX


def test_never_runs_no_neural_draft_and_always_keeps_it_whole():
    """draftPrefill: Never and Always."""
    never = controller(draft_prefill=DraftPrefill.NEVER)
    plan = never.plan_draft(batch(view(0), view(1, prefill_tokens=30)))
    assert not plan.run_neural
    assert "eagle" not in plan.drafters
    always = controller(draft_prefill=DraftPrefill.ALWAYS)
    always.suspend("lookup", "for this test")
    plan = always.plan_draft(batch(view(0, draft_ready=False, remaining_tokens=1)))
    assert plan.run_neural
    assert plan.neural_tokens == 0


def test_the_prompts_of_a_crowd_do_not_go_through_a_draft_that_will_not_serve_it():
    """TurboSpec's threshold is met in decoding, when the prompts have been through; those who wait count before."""
    bends = StepCost(per_batched_token_s=1e-5, per_batched_token_above_knee_s=2e-3, knee_tokens=16, constant_s=0.02)
    loop = controller(POOL[1:], target=bends)
    prompt = view(0, prefill_tokens=100, output_tokens=0)
    assert loop.plan_draft(dataclasses.replace(batch(prompt), waiting=40)).run_neural, "a stranger has its chance"
    for number in range(20):
        step(loop, 0.022, number=number, tried=RequestOutcome("r0", None, "eagle", 3, 3, 3, 1))
    assert loop.plan_draft(batch(prompt)).run_neural
    assert not loop.plan_draft(dataclasses.replace(batch(prompt), waiting=40)).run_neural


def test_a_pin_holds_until_it_is_released():
    """The profiler and the benchmarks hold K; pinned to 0 the engine must cost what plain decoding costs."""
    loop = controller()
    loop.pin(0)
    plan = loop.plan_draft(batch(view(0, prefill_tokens=12), view(1)))
    assert (plan.draft_tokens, plan.run_neural, plan.prefill_draft) == (0, False, False)
    loop.pin(3, "eagle")
    plan = loop.plan_draft(batch(view(0, prefill_tokens=12), view(1)))
    assert (plan.draft_tokens, plan.neural_tokens, plan.run_neural, plan.prefill_draft) == (3, 3, True, True)
    assert loop.plan_verify(batch(view(0, proposed=3, drafter="eagle"))).lengths == (3,)
    loop.pin(None)
    assert loop.plan_draft(batch(view())).purpose is Purpose.CHOICE


@pytest.mark.parametrize(("tokens", "drafter"), [(1, None), (1, "nobody"), (MAX + 1, "eagle"), (-1, None)])
def test_a_pin_that_the_engine_cannot_hold_is_refused(tokens, drafter):
    """The sentence names what the engine takes."""
    with pytest.raises(ValueError, match=r"pool|0\.\.4"):
        controller().pin(tokens, drafter)


def test_a_drafter_that_failed_is_used_no_more_until_it_is_resumed():
    """suspend: it raised, proposed nonsense, or could not load. The reason shows in the state."""
    loop = controller()
    loop.suspend("eagle", "it raised: out of memory")
    plan = loop.plan_draft(batch(view(0), view(1, prefill_tokens=9)))
    assert not plan.run_neural
    assert loop.snapshot().drafters["eagle"].suspended == "it raised: out of memory"
    loop.suspend("lookup", "same")
    assert loop.plan_draft(batch(view())).draft_tokens == 0
    assert loop.snapshot().reason is Reason.NO_DRAFTER
    loop.resume("eagle")
    assert loop.plan_draft(batch(view())).drafters == ("eagle",)


def test_a_pool_without_drafters_serves_plainly():
    """An empty draft pool is legal."""
    loop = controller(())
    made = batch(view(0), view(1, prefill_tokens=3))
    assert loop.plan_draft(made).draft_tokens == 0
    assert loop.plan_verify(made).lengths == (0, 0)
    assert loop.snapshot().reason is Reason.NO_DRAFTER


@pytest.mark.parametrize(
    "pool",
    [(DrafterSpec("a", False), DrafterSpec("a", True)), (DrafterSpec("a", True), DrafterSpec("b", True))],
)
def test_a_pool_that_the_engine_cannot_run_is_refused(pool):
    """Two drafters of one name, or two neural ones."""
    with pytest.raises(ValueError, match="drafters:"):
        Settings(pool, MAX)


def step(
    loop: Controller, step_s: float, *, target_s: float = 0.02, number: int = 0, tried: RequestOutcome | None = None
) -> None:
    loop.plan_verify(batch(view()))
    draft = loop.plan_draft(batch(view()))
    loop.observe(
        StepOutcome(
            now=number * 0.02,
            step_s=step_s,
            target_s=target_s,
            n_context=100,
            n_batched=1,
            n_requests=1,
            n_decoding=1,
            mode=ExecutionMode.UNIFORM,
            tokens=1,
            verify_plan=VerifyPlan((0,)),
            draft_plan=draft,
            requests=() if tried is None else (tried,),
        )
    )


@pytest.mark.parametrize("absurd", [float("nan"), float("inf"), -1.0, 0.0, 4000.0, 2.5])
def test_absurd_step_times_are_dropped_and_counted(absurd):
    """A suspended machine's step changes no estimate and no busy time, be it that the target's pass took no longer than
    ever; its tokens still count."""
    loop = controller()
    for number in range(5):
        step(loop, 0.0201, number=number)
    before = loop.snapshot()
    step(loop, absurd, number=6)
    after = loop.snapshot()
    assert after.dropped_steps == before.dropped_steps + 1
    assert after.busy_s == before.busy_s
    assert after.goodput_tokens_per_s == before.goodput_tokens_per_s
    assert after.output_tokens == before.output_tokens + 1


def test_a_target_time_that_nobody_measured_is_the_rest_of_the_step():
    """NaN in target_s alone means unknown; the step counts."""
    loop = controller()
    step(loop, 0.02, target_s=float("nan"))
    assert loop.snapshot().dropped_steps == 0


def test_an_idle_pod_says_no_traffic():
    """Before the first step, and some seconds after the last one."""
    loop = controller()
    assert loop.snapshot().reason is Reason.NO_TRAFFIC
    step(loop, 0.02)
    assert loop.snapshot(now=0.1).reason is Reason.MEASURING
    assert loop.snapshot(now=60.0).reason is Reason.NO_TRAFFIC


def test_a_drafter_that_is_not_in_the_pool_cannot_be_suspended():
    """A typo must not pass silently."""
    with pytest.raises(ValueError, match="not in the pool"):
        controller().suspend("nobody", "why")
