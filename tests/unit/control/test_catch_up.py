"""Safe resume: which holes in the neural draft's KV are worth a draft-only forward, and how much of it a step bears."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.acceptance import WARM_TRIALS
from outrider_runtime.control.batch import (
    Batch,
    CatchUpOutcome,
    DraftPlan,
    ExecutionMode,
    Purpose,
    RequestOutcome,
    RequestView,
    StepOutcome,
    VerifyPlan,
)
from outrider_runtime.control.catch_up import LEAST_CHUNK_TOKENS, Room, holes_to_close
from outrider_runtime.control.choice import TargetPrice
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.costs import DrafterCost, LatencyModel, Shape, StepCost
from outrider_runtime.control.decision import choose_draft
from outrider_runtime.control.drafting import NOBODY, DraftChoice, DraftProblem
from outrider_runtime.control.problem import Columns
from outrider_runtime.control.settings import DrafterSpec, DraftPrefill, HotSettings, Settings, SLOTarget

TARGET = StepCost(per_context_token_s=1e-7, per_batched_token_s=1e-5, constant_s=0.02)
DRAFT = DrafterCost(StepCost(per_batched_token_s=1e-4, constant_s=1e-3))
PRICE = TargetPrice(2.0, TARGET, TARGET, None, math.inf, 0.02, 0.02, 0.0)
NOTHING = Room(10_000, math.inf)
MAX = 4


def request(number: int, hole: int, **fields: object) -> RequestView:
    values: dict[str, object] = {
        "id": f"r{number}", "slo_class": None, "context_tokens": 400, "prefill_tokens": 0, "prefill_left": 0,
        "output_tokens": 100, "remaining_tokens": 1000, "elapsed_s": 1.0, "draft_ready": hole == 0, "draft_hole": hole,
    }  # fmt: skip
    return RequestView(**{**values, **fields})  # type: ignore[arg-type]


def problem(hazards: list[float], lookup: float = 0.0) -> DraftProblem:
    """One neural drafter, number 0, of these hazards a request; a lookup beside it if its hazard is not 0."""
    requests = len(hazards)
    rows = [hazards, [lookup] * requests] if lookup else [hazards]
    gains = np.stack([np.cumprod(np.tile(row, (MAX, 1)), axis=0) for row in rows]).astype(np.float32)
    passes = np.array([0.0, *(1.2e-3 * np.arange(1, MAX + 1))])
    return DraftProblem(
        gains=gains, offers=np.ones_like(gains), usable=np.ones((len(rows), requests), dtype=bool), neural=0,
        draft_s=np.stack([passes, np.full(MAX + 1, 1e-4)][: len(rows)]), query_costs_s=np.zeros(requests),
        neural_token_s=1e-4, price=PRICE, rate=requests / 0.02, budget=1000,
    )  # fmt: skip


def pass_s(shape: Shape) -> float:
    return DRAFT.seconds(shape, 1)


def closed(views: list[RequestView], hazards: list[float], room: Room = NOTHING, lookup: float = 0.0) -> dict[str, int]:
    whole = problem(hazards, lookup)
    nothing = DraftChoice(0, 0, np.full(len(views), NOBODY), 0.0, 0.0)
    return holes_to_close(Columns.of(views), whole, nothing, choose_draft(whole), pass_s, room)


def test_a_hole_is_closed_where_the_rest_of_the_answer_pays_for_it():
    """900 tokens of draft forward, 91 ms or 4.5 tokens, against a hundred that come at half the price."""
    assert closed([request(0, 900, context_tokens=1000)], [0.8]) == {"r0": 900}


def test_a_hole_is_left_where_the_answer_is_nearly_over():
    """The same request with 3 tokens to go."""
    assert closed([request(0, 900, context_tokens=1000, remaining_tokens=3)], [0.8]) == {}


def test_a_large_max_tokens_does_not_justify_a_long_forward():
    """Bug: users leave max_tokens at the model's limit; after 10 tokens nobody knows that 4000 will follow."""
    views = [request(0, 3900, context_tokens=4000, output_tokens=10, remaining_tokens=4000)]
    assert closed(views, [0.3]) == {}
    assert closed([views[0]._replace(output_tokens=2000)], [0.3]) == {"r0": 3900}


def test_nothing_is_caught_up_that_will_not_be_speculated_on():
    """A draft that is never accepted, and a request that a lookup serves as well."""
    assert closed([request(0, 40)], [0.02]) == {}
    assert closed([request(0, 40)], [0.8], lookup=0.8) == {}


def test_a_hole_is_left_where_the_draft_would_then_not_run():
    """Bug: the passes pay for two requests together, but one of them is nearly over; for the other alone they do not,
    and its catch-up would be for nothing."""
    together = problem([0.11, 0.11])
    assert choose_draft(together).neural_tokens > 0
    views = [request(0, 40), request(1, 300, remaining_tokens=3)]
    assert choose_draft(replace(together, usable=np.array([[True, False]]))).neural_tokens == 0
    assert closed([request(0, 40), request(1, 40)], [0.11, 0.11]) == {"r0": 40, "r1": 40}
    assert closed(views, [0.11, 0.11]) == {}


def test_the_best_return_goes_first_where_the_step_holds_one():
    """Two equal holes, one of a request that accepts more."""
    assert closed([request(0, 60), request(1, 60)], [0.6, 0.9], Room(70, math.inf)) == {"r1": 60}


def test_a_long_hole_is_closed_in_chunks_that_fit_the_time_of_the_step():
    """4 ms to spare: 30 tokens' worth is no chunk, 5 ms hold one."""
    assert closed([request(0, 300)], [0.8], Room(10_000, 0.004)) == {}
    caught = closed([request(0, 300)], [0.8], Room(10_000, 0.005))
    assert LEAST_CHUNK_TOKENS <= caught["r0"] < 300
    assert pass_s(Shape(100, caught["r0"], 1, 100 * caught["r0"] / 1000)) <= 0.005


REQUESTS = st.lists(
    st.tuples(st.integers(0, 500), st.floats(0.0, 0.95), st.integers(0, 600), st.integers(1, 600)),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(REQUESTS, st.integers(0, 600), st.floats(0.0, 0.05))
def test_whatever_is_caught_up_fits_and_pays(drawn, tokens, seconds):
    """Within the room, no more than the hole, only for those the draft would serve, and worth its seconds for each."""
    views = [
        request(n, hole, context_tokens=500, output_tokens=given, remaining_tokens=left)
        for n, (hole, _, given, left) in enumerate(drawn)
    ]
    hazards = [hazard for _, hazard, _, _ in drawn]
    caught = closed(views, hazards, Room(tokens, seconds))
    whole = problem(hazards)
    served = choose_draft(whole).drafters
    assert sum(caught.values()) <= tokens
    chosen = [(view, caught[view.id]) for view in views if view.id in caught]
    context = sum(500 - view.draft_hole for view, _ in chosen)
    if chosen:
        assert pass_s(Shape(context, sum(caught.values()), len(chosen))) <= seconds
    for view, taken in chosen:
        assert min(view.draft_hole, LEAST_CHUNK_TOKENS) <= taken <= view.draft_hole
        assert served[int(view.id[1:])] == 0
        most = min(view.remaining_tokens, max(view.output_tokens, 64))
        assert most > whole.rate * pass_s(Shape(500 - view.draft_hole, view.draft_hole, 1)), "gains more than it makes"


# -- in the loop ---------------------------------------------------------------------------------------------------


def controller(**hot: object) -> Controller:
    """One that has seen the draft accept nine of ten."""
    latency = LatencyModel(dict.fromkeys(ExecutionMode, TARGET), {"draft": DRAFT})
    made = Settings((DrafterSpec("draft", neural=True),), MAX, hot=HotSettings(max_draft_tokens=MAX, **hot))  # type: ignore[arg-type]
    ticks = itertools.count()
    loop = Controller(made, latency, clock=lambda: next(ticks) * 1e-6, rng=np.random.default_rng(0))
    for number in range(int(WARM_TRIALS)):
        loop.observe(outcome(number * 0.02, requests=(RequestOutcome("other", None, "draft", 4, 4, 4, 4),)))
    return loop


def outcome(
    now: float, requests: tuple[RequestOutcome, ...] = (), caught: CatchUpOutcome | None = None, step_s: float = 0.02
) -> StepOutcome:
    return StepOutcome(
        now=now, step_s=step_s, target_s=0.02, n_context=100, n_batched=1, n_requests=1, n_decoding=1,
        mode=ExecutionMode.UNIFORM, tokens=1, verify_plan=VerifyPlan((0,)),
        draft_plan=DraftPlan(0, (None,), False, False), requests=requests, draft_s={}, catch_up=caught,
    )  # fmt: skip


def plans(loop: Controller, *views: RequestView, count: int = 40) -> list[DraftPlan]:
    return [loop.plan_draft(Batch(views, now=0.3, token_budget=2048, free_kv_tokens=10_000)) for _ in range(count)]


def test_a_request_is_drafted_for_in_the_step_that_closes_its_hole():
    """The draft runs over the hole, then over the step, then it proposes."""
    plan = next(plan for plan in plans(controller(), request(0, 90)) if plan.catch_up)
    assert plan.catch_up == {"r0": 90}
    assert plan.drafters == ("draft",)
    assert plan.run_neural
    assert plan.neural_tokens > 0
    assert plan.purpose is Purpose.CHOICE


@pytest.mark.parametrize("prefill", [DraftPrefill.NEVER, DraftPrefill.AUTO], ids=["Never", "suspended"])
def test_a_draft_that_may_not_run_closes_no_hole(prefill):
    """draftPrefill: Never, or a draft that has failed."""
    loop = controller(draft_prefill=prefill)
    if prefill is DraftPrefill.AUTO:
        loop.suspend("draft", "for this test")
    assert not any(plan.catch_up or plan.run_neural for plan in plans(loop, request(0, 90)))


def test_a_prompt_that_is_being_read_is_not_caught_up():
    """It is not drafted for before it decodes; its hole may as well be closed then."""
    views = (request(0, 90, prefill_tokens=64, prefill_left=200, output_tokens=0), request(1, 0))
    assert not any(plan.catch_up for plan in plans(controller(), *views))


def test_a_tight_class_keeps_its_tpot_while_another_catches_up():
    """Ten milliseconds to spare a step: the hole of 1500 tokens, 150 ms, is closed in chunks of that."""
    loop = controller(slo_classes=(SLOTarget("tight", 0.040), SLOTarget("loose", 10.0)))
    tight = request(1, 0, slo_class="tight", output_tokens=51, elapsed_s=50 * 0.040 * 0.95)
    late = request(0, 1500, slo_class="loose", context_tokens=2000, output_tokens=1500, remaining_tokens=2000)
    caught = [plan.catch_up["r0"] for plan in plans(loop, late, tight) if plan.catch_up]
    assert caught
    assert max(caught) < 200
    loop = controller()
    assert [plan.catch_up["r0"] for plan in plans(loop, late, tight) if plan.catch_up][0] == 1500  # noqa: RUF015


def test_what_a_catch_up_took_prices_the_next_one_and_not_ordinary_drafting():
    """A pass over a long hole that takes three times as long as the profile says."""
    loop = controller()
    latency = loop._evidence.latency
    shape, step = Shape(300, 100, 1, 30), Shape(400, 2, 2, 0.8)
    before, drafting = latency.catch_up_s("draft", shape), latency.draft_s("draft", step, 3)
    for number in range(20):
        caught = CatchUpOutcome(tokens=100, n_requests=1, n_context=300, n_context_query=30, seconds=3 * before)
        loop.observe(outcome(1.0 + number * 0.05, caught=caught, step_s=0.02 + 3 * before))
    assert latency.catch_up_s("draft", shape) > 2.3 * before
    assert latency.draft_s("draft", step, 3) == pytest.approx(drafting, rel=1e-6)
    seen = loop.snapshot()
    assert seen.caught_up_tokens == 2000
    assert seen.catch_up_s == pytest.approx(60 * before)
    assert seen.dropped_steps == 0
