"""A choice that is kept: verification by it is what looking anew would find, and it ends where it holds no more."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.batch import Batch, DraftPlan, ExecutionMode, Purpose, RequestOutcome, RequestView
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.costs import DrafterCost, LatencyModel, StepCost
from outrider_runtime.control.kept import KeptChoice
from outrider_runtime.control.settings import DrafterSpec, DraftPrefill, HotSettings, Settings, SLOTarget

from tests.unit.control.simulated_engine import SimulatedEngine, World

POOL = (DrafterSpec("lookup", neural=False), DrafterSpec("eagle", neural=True))
TARGET = StepCost(per_batched_token_s=3e-3, constant_s=0.02)
COSTS = {
    "eagle": DrafterCost(StepCost(constant_s=5e-4, per_batched_token_s=1e-4)),
    "lookup": DrafterCost(StepCost(constant_s=1e-4), autoregressive=False),
}
MAX = 4


def controller(**hot: object) -> Controller:
    ticks = itertools.count()
    made = Settings(POOL, MAX, hot=HotSettings(max_draft_tokens=MAX, **hot))  # type: ignore[arg-type]
    return Controller(
        made, LatencyModel(dict.fromkeys(ExecutionMode, TARGET), COSTS), clock=lambda: next(ticks) * 1e-6,
        rng=np.random.default_rng(0),
    )  # fmt: skip


def decoding(number: int, **fields: object) -> RequestView:
    view = RequestView(f"r{number}", None, 100, 0, 0, 5, 50, 1.0, draft_ready=True)
    return view._replace(**fields)  # type: ignore[arg-type]


def batch(*views: RequestView, budget: int = 2048) -> Batch:
    return Batch(views, now=1.0, token_budget=budget, free_kv_tokens=10_000)


def proposals(made: Batch, plan: DraftPlan, counts: list[int]) -> Batch:
    """The same batch a step later: what each drafter was asked for has come, or fewer."""
    asked = [
        0 if drafter is None else plan.neural_tokens if drafter == "eagle" else plan.draft_tokens
        for drafter in plan.drafters
    ]
    views = [
        view._replace(proposed=min(count, most), drafter=drafter)
        for view, drafter, most, count in zip(made.requests, plan.drafters, asked, counts, strict=True)
    ]
    return dataclasses.replace(made, requests=tuple(views))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, MAX), st.integers(0, MAX)), min_size=1, max_size=5), st.integers(1, 40))
def test_where_costs_bend_the_same_proposals_are_verified_as_before(requests, knee):
    """The worth of one position hangs on the others there: looked at once, and again where anything is different."""
    bent = StepCost(per_batched_token_s=1e-3, per_batched_token_above_knee_s=4e-3, knee_tokens=knee, constant_s=0.02)
    loop = controller()
    loop.replace_latency(LatencyModel(dict.fromkeys(ExecutionMode, bent), COSTS))
    taught(loop, [accepted for accepted, _ in requests])
    made = batch(*(decoding(number) for number in range(len(requests))))
    plan = loop.plan_draft(made)
    later = proposals(made, plan, [count for _, count in requests])
    first = loop.plan_verify(later)
    assert loop.plan_verify(later) == first
    fewer = proposals(made, plan, [max(0, count - 1) for _, count in requests])
    kept = loop.plan_verify(fewer)
    loop._planner._kept.keep(plan, [view.id for view in made.requests], {})
    assert kept == loop.plan_verify(fewer)


def test_where_nothing_pays_it_does_not_for_those_who_come_in_addition():
    """At high load somebody comes in nearly every step; deciding anew each time took a percent of it."""
    loop = controller(draft_prefill=DraftPrefill.NEVER)
    taught(loop, [0] * 16)
    full = batch(*(decoding(number) for number in range(16)))
    assert loop.plan_draft(full).draft_tokens == 0
    assert loop._planner._kept.passed() == 1
    newcomer = decoding(16, context_tokens=0, prefill_tokens=40, output_tokens=0)
    plan = loop.plan_draft(batch(*full.requests[1:], newcomer))
    assert plan.drafters == (None,) * 16
    assert loop._planner._kept.passed() == 2, "kept"
    loop.plan_draft(batch(*full.requests[:12]))
    assert loop._planner._kept.passed() == 1, "a smaller batch is another matter"


def taught(loop: Controller, accepted: list[int]) -> None:
    """Requests of different luck: each was asked four tokens several times."""
    outcomes = [
        RequestOutcome(f"r{number}", None, drafter, MAX, MAX, MAX, found)
        for number, found in enumerate(accepted)
        for drafter in ("lookup", "eagle")
    ]
    for _ in range(8):
        loop._evidence.acceptance.observe(outcomes, 1.0)


def test_lookups_go_on_where_one_of_many_comes_in_addition():
    """The newcomer waits for the next choice; among few requests, one more may change everything."""
    kept = KeptChoice()
    names = [f"r{number}" for number in range(8)]
    kept.keep(DraftPlan(3, ("lookup",) * 8, False, False), names, {})
    prompt = decoding(8, context_tokens=0, prefill_tokens=40, output_tokens=0)
    views = [decoding(number) for number in range(8)]
    assert kept.plan(batch(*views, prompt), skips_prompts=False) is None, "the neural draft might have to read it"
    plan = kept.plan(batch(*views[1:], prompt), skips_prompts=True)
    assert plan is not None
    assert plan.drafters == ("lookup",) * 7 + (None,)
    assert kept.plan(batch(*views[2:], prompt), skips_prompts=True) is None, "one in seven is new"


@pytest.mark.parametrize("needs_whole_kv", [True, False])
@pytest.mark.parametrize("load", [8, 40])
def test_a_plan_told_by_names_alone_is_the_one_that_looking_finds(load, needs_whole_kv):
    """Bug: under load the loop holds on to something that it would not hold on to if it looked."""

    class Both(Controller):
        plain = 0

        def plan_draft(self, batch: Batch) -> DraftPlan:
            told = None
            if all(not view.prefill_tokens and not view.proposed for view in batch.requests):
                told = copy.deepcopy(self)._planner.plain({view.id for view in batch.requests})
            looked = super().plan_draft(batch)
            self.plain += told is not None
            assert told in (None, looked)
            return looked

    hazard = {"lookup": lambda _position, _request: 0.5, "eagle": lambda _position, _request: 0.3}
    world = World(TARGET, COSTS, hazard, {"lookup": 0.1}, neural="eagle")
    pool = (POOL[0], dataclasses.replace(POOL[1], needs_whole_kv=needs_whole_kv))
    loop = Both(
        Settings(pool, MAX, hot=HotSettings(max_draft_tokens=MAX)), world.latency, clock=lambda: 0.0,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    records = SimulatedEngine(world, loop, load=load).run(300)
    plain = sum(not record.draft_tokens and not record.ran_neural for record in records)
    assert loop.plain > plain / 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, MAX), st.integers(0, MAX)), min_size=1, max_size=5))
def test_what_was_kept_is_what_looking_anew_finds(requests):
    """Bug: a position is verified that does not pay, or one that pays is not."""
    loop = controller()
    taught(loop, [accepted for accepted, _ in requests])
    made = batch(*(decoding(number) for number in range(len(requests))))
    plan = loop.plan_draft(made)
    later = proposals(made, plan, [count for _, count in requests])
    kept = loop.plan_verify(later)
    loop._planner._kept._paying = {}
    assert kept.lengths == loop.plan_verify(later).lengths


def chosen() -> tuple[KeptChoice, dict[str, int]]:
    kept = KeptChoice()
    kept.keep(DraftPlan(3, ("eagle",), True, True, 3), ["r0"], {"r0": [(1, 1), (3, 3)]})
    return kept, {"lookup": 0, "eagle": 1}


@pytest.mark.parametrize(
    ("view", "lengths"),
    [
        (decoding(0, proposed=3, drafter="eagle"), (3,)),
        (decoding(0, proposed=3, drafter="lookup"), (1,)),
        (decoding(0, proposed=3, drafter="gone"), (0,)),
        (decoding(0, proposed=3, drafter="eagle", remaining_tokens=2), (1,)),
        (decoding(1, proposed=3, drafter="eagle"), None),
        (decoding(1, prefill_tokens=9), (0,)),
    ],
    ids=["eagle", "stood in by lookup", "a drafter that left", "nearly done", "a stranger's proposals", "a prompt"],
)
def test_lengths_of_a_kept_choice(view, lengths):
    kept, index = chosen()
    assert kept.lengths(batch(view), index) == lengths


def test_a_kept_choice_never_fills_more_than_the_step_holds():
    kept, index = chosen()
    view = decoding(0, proposed=3, drafter="eagle")
    assert kept.lengths(batch(view, budget=4), index) == (3,)
    assert kept.lengths(batch(view, budget=3), index) is None
    kept.drop()
    assert kept.lengths(batch(view), index) is None


def test_a_number_that_hangs_on_others_is_looked_at_once():
    kept, index = chosen()
    kept.keep(DraftPlan(3, ("eagle",), True, True, 3), ["r0"], {"r0": [(1, 1), (1, 3)]})
    view = decoding(0, proposed=3, drafter="eagle")
    assert kept.lengths(batch(view._replace(drafter="lookup")), index) == (1,)
    assert kept.lengths(batch(view), index) is None
    kept.verified(batch(view), (2,))
    assert kept.lengths(batch(view), index) == (2,)
    assert kept.lengths(batch(view._replace(proposed=2)), index) is None
    assert kept.lengths(batch(view._replace(proposed=1)), index) == (1,)


@pytest.mark.parametrize("knee", [1, 6, 9])
def test_where_costs_bend_most_proposals_need_no_look(knee):
    """They pay on either side of the knee, or on neither."""
    bent = StepCost(per_batched_token_s=1e-3, per_batched_token_above_knee_s=1e-3, knee_tokens=knee, constant_s=0.02)
    loop = controller()
    loop.replace_latency(LatencyModel(dict.fromkeys(ExecutionMode, bent), COSTS))
    taught(loop, [3, 3, 3, 0])
    made = batch(*(decoding(number) for number in range(4)))
    plan = loop.plan_draft(made)
    later = proposals(made, plan, [1] * 4)
    assert plan.draft_tokens
    assert loop._planner._kept_lengths(later) == loop.plan_verify(later).lengths


def test_a_class_that_falls_behind_ends_it():
    """AdaServe's classes come first: who is late is looked at in every step."""
    loop = controller(slo_classes=(SLOTarget("tight", 0.03),))
    ahead = batch(decoding(0, slo_class="tight", elapsed_s=0.01))
    plan = loop.plan_draft(ahead)
    assert plan.purpose is Purpose.CHOICE
    assert loop._planner._kept_lengths(proposals(ahead, plan, [MAX])) is not None
    late = batch(decoding(0, slo_class="tight", elapsed_s=0.2))
    assert loop._planner._kept_lengths(proposals(late, plan, [MAX])) is None
