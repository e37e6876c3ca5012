"""SLO classes in the two plans: who is served first, what prompts may take, who may start."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.batch import Batch, ExecutionMode, Purpose, RequestView, Waiting
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.costs import DrafterCost, LatencyModel, StepCost
from outrider_runtime.control.goodput import Goodput
from outrider_runtime.control.latency import OnlineLatency
from outrider_runtime.control.pacing import admissions, nobody_can_be_late, token_budget
from outrider_runtime.control.problem import this_step
from outrider_runtime.control.settings import DrafterSpec, HotSettings, Mode, Settings, SLOTarget
from outrider_runtime.control.slo import MARGIN

from tests.unit.control.simulated_engine import SimulatedEngine, World

CPU = StepCost(per_batched_token_s=2e-3, constant_s=12.5e-3)
EAGLE = DrafterCost(StepCost(per_batched_token_s=1e-4, constant_s=1e-3))
MAX = 4


def controller(*classes: SLOTarget, mode: Mode = Mode.CLOSED_LOOP) -> Controller:
    pool = (DrafterSpec("lookup", neural=False), DrafterSpec("eagle", neural=True))
    lookup = DrafterCost(StepCost(constant_s=1e-4), autoregressive=False)
    latency = LatencyModel(dict.fromkeys(ExecutionMode, CPU), {"eagle": EAGLE, "lookup": lookup})
    hot = HotSettings(mode=mode, max_draft_tokens=MAX, slo_classes=classes)
    ticks = itertools.count()
    return Controller(
        Settings(pool, MAX, hot=hot), latency, clock=lambda: next(ticks) * 1e-6, rng=np.random.default_rng(0)
    )


def view(number: int, **fields: object) -> RequestView:
    values: dict[str, object] = {
        "id": f"r{number}", "slo_class": "loose", "context_tokens": 100, "prefill_tokens": 0, "prefill_left": 0,
        "output_tokens": 21, "remaining_tokens": 60, "elapsed_s": 0.5, "draft_ready": True,
    }  # fmt: skip
    return RequestView(**{**values, **fields})  # type: ignore[arg-type]


VIEWS = st.builds(
    view,
    number=st.integers(0, 10**6),
    slo_class=st.sampled_from([None, "loose", "tight"]),
    output_tokens=st.integers(0, 60),
    elapsed_s=st.floats(0.0, 4.0),
    prefill_tokens=st.sampled_from([0, 0, 0, 40]),
    prefill_left=st.sampled_from([0, 0, 0, 40]),
    remaining_tokens=st.integers(0, 60),
    proposed=st.integers(0, MAX),
    drafter=st.sampled_from([None, "lookup", "eagle"]),
    draft_ready=st.booleans(),
)
TIGHT, LOOSE = SLOTarget("tight", 0.03), SLOTarget("loose", 5.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(VIEWS, min_size=1, max_size=6), st.integers(1, 60), st.integers(0, 40))
def test_no_plan_exceeds_what_fits_with_classes_either(views, budget, kv):
    """Token budget, KV memory and proposals hold whatever is forced in."""
    loop = controller(TIGHT, LOOSE)
    made = Batch(tuple(views), 1.0, budget, kv, next=Waiting("tight", 40, 64))
    draft = loop.plan_draft(made)
    verify = loop.plan_verify(made)
    for length, each in zip(verify.lengths, views, strict=True):
        assert 0 <= length <= max(0, min(each.proposed, each.remaining_tokens - 1))
    decoding = sum(each.prefill_tokens == each.prefill_left == 0 for each in views)
    assert sum(verify.lengths) <= max(0, min(budget, kv) - decoding)
    if verify.token_budget is not None:
        assert len(views) + sum(verify.lengths) < verify.token_budget < budget
    assert 0 <= draft.draft_tokens <= MAX
    for name, each in zip(draft.drafters, views, strict=True):
        assert name is None or (each.prefill_left == 0 and each.remaining_tokens > 2)
        assert name != "eagle" or each.draft_ready


@settings(max_examples=60, deadline=None)
@given(st.lists(VIEWS, min_size=1, max_size=6))
def test_classes_that_nobody_misses_change_no_plan(views):
    """Without SLO pressure the result is goodput's own choice."""
    idle = [SLOTarget("tight", 50.0), SLOTarget("loose", 50.0)]
    with_classes, without = controller(*idle), controller()
    made = Batch(tuple(views), 1.0, 2048, 10_000)
    assert with_classes.plan_draft(made) == without.plan_draft(made)
    assert with_classes.plan_verify(made) == without.plan_verify(made)


LATENCIES = st.builds(
    lambda token, constant, logits: OnlineLatency(
        LatencyModel(
            dict.fromkeys(
                ExecutionMode,
                StepCost(per_batched_token_s=token, constant_s=constant, per_logits_token_s=logits),
            ),
            {},
        ),
        (), None,
    ),
    token=st.floats(1e-6, 4e-3), constant=st.floats(1e-3, 0.1), logits=st.floats(0.0, 2e-3),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    latency=LATENCIES, views=st.lists(VIEWS, min_size=1, max_size=6), tpot_s=st.floats(0.5, 60.0),
    prompt=st.integers(1, 2000), budget=st.integers(64, 2048),
)  # fmt: skip
def test_where_nobody_can_be_late_prompts_and_newcomers_are_not_limited(latency, views, tpot_s, prompt, budget):
    """The short way to that answer never says so where the long one finds a limit."""
    tpots_s: dict[str | None, float] = {"tight": tpot_s, "loose": 2 * tpot_s}
    made = Batch(tuple(views), 1.0, budget, 10_000, next=Waiting("tight", prompt, 64))
    if not nobody_can_be_late(made, latency, tpots_s):
        return
    step = this_step(made, latency, Goodput())
    gained = np.ones(step.requests)
    assert token_budget(made, step, gained, 0, latency, tpots_s, draft_s=0.0, draft_token_s=0.0) is None
    assert admissions(made, step, gained, 0, latency, tpots_s, 0.0) is None


@pytest.mark.parametrize(("tpot_s", "elapsed_s", "late"), [(60.0, 1.0, False), (0.5, 1.0, True), (60.0, 1300.0, True)])
def test_a_class_is_out_of_danger_if_it_bears_the_longest_step_from_here(tpot_s, elapsed_s, late):
    """2048 tokens of 2 ms; the last request has spent all the time that its class gives it."""
    views = tuple(view(number, elapsed_s=elapsed_s) for number in range(4))
    latency = OnlineLatency(LatencyModel(dict.fromkeys(ExecutionMode, CPU), {}), (), None)
    made = Batch(views, 1.0, 2048, 10_000, next=Waiting("loose", 100, 64))
    assert nobody_can_be_late(made, latency, {"loose": tpot_s}) is not late


def busy_batch(**tight: object) -> Batch:
    """Eight requests on a machine where every token costs: goodput alone speculates for nobody."""
    others = [view(number) for number in range(7)]
    return Batch((*others, view(7, slo_class="tight", **tight)), 1.0, 2048, 10_000)


def tired(loop: Controller) -> Controller:
    """As after text that is accepted half of the time; both drafters were met."""
    loop.pin(0)
    acceptance = loop._evidence.acceptance
    acceptance.tried[:] = 100.0
    acceptance.accepted[:] = 50.0
    acceptance.met[:] = True
    acceptance._refresh()
    loop.pin(None)
    return loop


def test_a_request_that_is_behind_is_drafted_for_where_goodput_would_not():
    """Two phases in plan_draft: K and the drafter of the tight request come first; the others stay plain."""
    late = {"elapsed_s": 0.61, "output_tokens": 22}  # 29 ms a token of 30, and a step of 30 ms to come
    assert tired(controller()).plan_draft(busy_batch(**late)).draft_tokens == 0
    plan = tired(controller(TIGHT, LOOSE)).plan_draft(busy_batch(**late))
    assert plan.purpose is Purpose.SLO
    assert plan.draft_tokens >= 1
    assert plan.drafters[7] is not None
    assert plan.drafters[:7] == (None,) * 7


def test_a_request_that_is_behind_verifies_where_goodput_would_not():
    """Two phases in plan_verify: the tight request's proposals are scored, the others' are not."""
    waiting = {"proposed": 2, "drafter": "eagle"}
    late = busy_batch(elapsed_s=0.61, output_tokens=21, **waiting)
    requests = tuple(one._replace(proposed=2, drafter="eagle") for one in late.requests)
    made = Batch(requests, 1.0, 2048, 10_000)
    for classes, expected in (((), 0), ((TIGHT, LOOSE), 1)):
        loop = tired(controller(*classes))
        loop.plan_draft(busy_batch())
        lengths = loop.plan_verify(made).lengths
        assert min(1, lengths[7]) == expected
        assert sum(lengths[:7]) == 0


@pytest.mark.parametrize(("waiting", "limited"), [(Waiting("loose", 900, 64), True), (None, False)])
def test_a_tight_class_lowers_the_steps_token_budget_while_prompts_wait(waiting, limited):
    """A whole chunk of 2048 tokens takes four seconds here, and nobody's TPOT survives that."""
    loop = controller(TIGHT, LOOSE)
    requests = busy_batch(elapsed_s=0.4, output_tokens=22).requests
    plan = loop.plan_verify(Batch(requests, 1.0, 2048, 10_000, next=waiting))
    assert (plan.token_budget is not None) == limited
    if plan.token_budget is not None:
        ends_s = 0.4 + CPU.constant_s + CPU.per_batched_token_s * plan.token_budget  # of this step
        rest_s = 63 * (CPU.constant_s + CPU.per_batched_token_s * len(requests))
        assert ends_s + rest_s <= (21 + 64) * 0.03 * MARGIN
        assert plan.token_budget > len(requests)


def test_a_prompt_that_waited_long_is_held_back_no_more():
    """Else prompts queue up without end where load stays high, and nobody gains."""
    loop = controller(TIGHT, LOOSE)
    requests = busy_batch(elapsed_s=0.4, output_tokens=22).requests
    batch = Batch(requests, 1.0, 2048, 10_000, next=Waiting("loose", 900, 64), patience_used=0.9)
    assert loop.plan_verify(batch).token_budget is not None
    assert loop.plan_verify(dataclasses.replace(batch, patience_used=1.1)).token_budget is None


def test_where_everybody_is_late_goodput_decides():
    """Forcing positions for all of them, at a price for each, would make all of them later still."""
    crowd = tuple(view(number, slo_class="tight", elapsed_s=0.61, output_tokens=22) for number in range(8))
    made = Batch(crowd, 1.0, 2048, 10_000)
    with_class, without = tired(controller(TIGHT)).plan_draft(made), tired(controller()).plan_draft(made)
    assert (with_class.draft_tokens, with_class.drafters) == (without.draft_tokens, without.drafters)


def test_prompts_are_held_back_without_a_drafter_too():
    """Bug: an empty pool has no acceptance to look at; the first prompt beside a classed request ended the engine."""
    settings = Settings((), MAX, hot=HotSettings(max_draft_tokens=MAX, slo_classes=(TIGHT, LOOSE)))
    latency = LatencyModel(dict.fromkeys(ExecutionMode, CPU))
    loop = Controller(settings, latency, clock=lambda: 0.0, rng=np.random.default_rng(0))
    requests = busy_batch(elapsed_s=0.4, output_tokens=22).requests
    plan = loop.plan_verify(Batch(requests, 1.0, 2048, 10_000, next=Waiting("loose", 900, 64)))
    assert plan.token_budget is not None
    assert sum(plan.lengths) == 0


def test_a_pinned_engine_is_measured_as_it_is():
    """The profiler's chunks must not be cut."""
    loop = controller(TIGHT, LOOSE)
    loop.pin(0)
    waiting = Waiting("loose", 900, 64)
    plan = loop.plan_verify(Batch(busy_batch(elapsed_s=0.4).requests, 1.0, 2048, 10_000, next=waiting))
    assert plan.token_budget is None
    assert plan.admit is None


def admitted(waiting: Waiting, *, tpot_s: float, requests: int = 8) -> bool:
    """Whether one more may start beside requests of one tight class that are on time so far."""
    views = [
        view(number, slo_class="tight", elapsed_s=21 * tpot_s * 0.8, output_tokens=22) for number in range(requests)
    ]
    plan = controller(SLOTarget("tight", tpot_s), LOOSE).plan_verify(
        Batch(tuple(views), 1.0, 2048, 10_000, next=waiting)
    )
    return plan.admit != 0


def test_nobody_starts_who_would_make_a_tight_class_miss():
    """A step of eight takes 28.5 ms here, one of nine 30.5 ms: too long for 29 ms a token in the long run, not for 50.

    On machines where every token costs, a fuller batch is a slower one for all: better to wait than all late."""
    assert not admitted(Waiting("loose", 40, 64), tpot_s=0.029)
    assert admitted(Waiting("loose", 40, 64), tpot_s=0.05)
    assert not admitted(Waiting("loose", 2000, 64), tpot_s=0.05), "reading its prompt takes four seconds"
    assert admitted(Waiting("loose", 40, 64), tpot_s=0.05, requests=1)


def test_the_prompts_of_those_who_follow_count_as_well():
    """Bug: a loose request was let in if the tight ones bore the fuller batch's decoding alone, and each of the nine
    that ends makes room for one whose prompt holds them all up: 11 ms a token here, beside a step of 30.5 ms."""
    assert not admitted(Waiting("loose", 40, 64), tpot_s=0.036)
    assert admitted(Waiting("loose", 5, 64), tpot_s=0.036)


def test_a_tight_request_starts_where_it_can_keep_its_own_pace():
    """Beside loose ones that fill the batch it would miss from its first token on."""
    loop = controller(SLOTarget("tight", 0.02), LOOSE)
    requests = tuple(view(number) for number in range(8))
    for waiting, expected in ((Waiting("tight", 20, 64), False), (Waiting("loose", 20, 64), True)):
        assert (loop.plan_verify(Batch(requests, 1.0, 2048, 10_000, next=waiting)).admit != 0) == expected


def test_a_burst_does_not_start_as_a_whole():
    """An idle engine takes as many as their own class bears: all at once would all be late."""
    loop = controller(SLOTarget("tight", 0.03), LOOSE)
    waiting = Waiting("tight", 20, 64)
    running: list[RequestView] = []
    for step in range(40):
        admit = loop.plan_verify(Batch(tuple(running), 1.0, 2048, 10_000, next=waiting)).admit
        if admit == 0:
            break
        assert admit is not None
        running += [
            view(100 * step + number, slo_class="tight", output_tokens=0, elapsed_s=0.0, prefill_tokens=20)
            for number in range(admit)
        ]
    turnover_s = 20 * CPU.per_batched_token_s / 64  # in a token's time, for each request: its place's next prompt
    each_s = CPU.per_batched_token_s + turnover_s
    assert CPU.constant_s + each_s * len(running) <= MARGIN * 0.03
    assert CPU.constant_s + each_s * (len(running) + 1) > MARGIN * 0.03


def test_an_idle_engine_takes_whoever_comes():
    """Bug: those of a burst that nobody hurries for waited for the first one's prompt; or nobody started at all."""
    loop = controller(SLOTarget("tight", 0.001), LOOSE)
    for waiting, expected in ((Waiting("loose", 20, 64), None), (Waiting("tight", 20, 64), 1)):
        assert loop.plan_verify(Batch((), 1.0, 2048, 10_000, next=waiting)).admit == expected


def test_a_request_for_one_token_is_let_in_like_others():
    """Bug: each of the others was taken to end as soon as it does, and their successors' prompts to delay it."""
    assert admitted(Waiting("loose", 40, 1), tpot_s=0.05)


def test_nobody_waits_longer_than_its_class_bears():
    """Whoever is overdue starts, whatever that does to the others: waiting is bounded."""
    assert admitted(Waiting("loose", 2000, 64, overdue=True), tpot_s=0.029)


def attainment(*classes: SLOTarget) -> dict[str | None, float]:
    """Share of finished requests within their TPOT: every third one is tight, eight run at any time."""
    hazards = {"eagle": lambda *_: 0.6, "lookup": lambda *_: 0.5}
    lookup = DrafterCost(StepCost(constant_s=1e-4), autoregressive=False)
    truth = World(CPU, {"eagle": EAGLE, "lookup": lookup}, hazards, {"lookup": 0.3}, neural="eagle")
    engine = SimulatedEngine(
        truth, controller(*classes), load=8, output=40, prompt=48, seed=1,
        classes=lambda number: "tight" if number % 3 == 0 else "loose",
    )  # fmt: skip
    engine.run(900)
    targets = {"tight": 0.036, "loose": 0.2}
    return {
        name: float(np.mean([(one.tpot_s or 0.0) <= targets[name] for one in engine.finished if one.slo_class == name]))
        for name in targets
    }


def test_a_tight_class_attains_more_and_the_loose_one_no_less():
    """The whole loop under load: forced positions and held-back prompts keep the tight class in time."""
    without = attainment()
    classes = attainment(SLOTarget("tight", 0.036), SLOTarget("loose", 0.2))
    assert classes["tight"] > without["tight"] + 0.2
    assert classes["loose"] >= without["loose"] - 0.02
