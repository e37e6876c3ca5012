"""The whole loop against engines whose costs and acceptance are known: it finds the right choice, and moves with it.

Two hardwares: on CPU every token costs (speculation pays only at small batches); on GPU tokens are nearly free up to
a knee. Costs are close to those measured with SmolLM2 on two cores, and to a 7B model on one GPU.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from outrider_runtime.control.batch import ExecutionMode, Purpose
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.costs import DrafterCost, LatencyModel, StepCost
from outrider_runtime.control.counters import Reason
from outrider_runtime.control.settings import DrafterSpec, HotSettings, Settings

from tests.unit.control.simulated_engine import Record, SimulatedEngine, World, goodput

CPU = StepCost(per_context_token_s=2e-6, per_batched_token_s=2e-3, constant_s=12.5e-3)
GPU = StepCost(1e-7, 1e-5, 3e-4, 32, 0.0, 0.0, 12e-3)
EAGLE = {
    CPU: DrafterCost(StepCost(per_batched_token_s=3e-4, constant_s=1.5e-3)),
    GPU: DrafterCost(StepCost(per_batched_token_s=2e-6, constant_s=0.7e-3)),
}
LOOKUP = DrafterCost(StepCost(constant_s=2e-4, per_request_s=3e-5), autoregressive=False)
MAX = 5


def world(target: StepCost, alpha: float, **fields: object) -> World:
    hazards = {"eagle": lambda *_: alpha, "lookup": lambda *_: 0.7}
    return World(target, {"eagle": EAGLE[target], "lookup": LOOKUP}, hazards, {"lookup": 0.3}, neural="eagle", **fields)  # type: ignore[arg-type]


def controller(target: StepCost, *names: str, profile: bool = True) -> Controller:
    pool = tuple(DrafterSpec(name, neural=name == "eagle") for name in names or ("eagle",))
    model = LatencyModel(dict.fromkeys(ExecutionMode, target), {"eagle": EAGLE[target], "lookup": LOOKUP})
    ticks = itertools.count()
    return Controller(
        Settings(pool, MAX, hot=HotSettings(max_draft_tokens=MAX)),
        model if profile else None,
        clock=lambda: next(ticks) * 1e-6,
        rng=np.random.default_rng(0),
    )


def static_goodput(
    truth: World, load: int, draft_tokens: int, drafter: str | None = None, steps: int = 400, output: int = 96
) -> float:
    loop = controller(truth.target, "lookup", "eagle")
    loop.pin(draft_tokens, drafter)
    return goodput(SimulatedEngine(truth, loop, load=load, output=output).run(steps))


@functools.cache
def best_static_goodput(target: StepCost, load: int, alpha: float) -> float:
    return max(static_goodput(world(target, alpha), load, k, "eagle", steps=200) for k in (0, 1, 2, 4))


def mean_length(records: list[Record]) -> float:
    return float(np.mean([record.draft_tokens for record in records]))


@pytest.mark.parametrize("profile", [True, False], ids=["profiled", "learning"])
@pytest.mark.parametrize(
    ("target", "load", "alpha"), [(GPU, 1, 0.8), (GPU, 24, 0.8), (CPU, 1, 0.8), (CPU, 8, 0.4), (GPU, 4, 0.6)]
)
def test_the_loop_is_as_good_as_the_best_static_length(target, load, alpha, profile):
    """It loses at most a few percent against the best of k = 0..5 chosen with hindsight, with and without a profile."""
    best = best_static_goodput(target, load, alpha)
    engine = SimulatedEngine(world(target, alpha), controller(target, profile=profile), load=load)
    engine.run(100)
    assert goodput(engine.run(250)) > 0.93 * best


def test_under_load_speculation_stops_and_costs_nothing():
    """Within 50 steps of the load k is 0, and the draft's forward does not run: plain decoding's cost."""
    engine = SimulatedEngine(world(CPU, 0.8), controller(CPU), load=1, output=40)
    assert mean_length(engine.run(150)[50:]) > 2
    engine.load = 24
    engine.run(50)
    loaded = engine.run(250)
    chosen = [record for record in loaded if record.draft_plan.purpose is Purpose.CHOICE]
    assert mean_length(chosen) < 0.05
    assert not any(record.ran_neural for record in chosen)
    assert engine.controller.snapshot().gated
    assert engine.controller.snapshot().reason is Reason.NOT_WORTH_IT
    assert goodput(loaded) > 0.97 * static_goodput(engine.world, 24, 0, steps=250, output=40)


def test_speculation_comes_back_within_fifty_steps_when_the_load_goes():
    """As new requests come in: the old ones' draft KV has holes."""
    engine = SimulatedEngine(world(CPU, 0.8), controller(CPU), load=24, output=30)
    engine.run(150)
    engine.load = 1
    engine.run(50)
    assert mean_length(engine.run(40)) > 2


@pytest.mark.parametrize("loaded", [60, 400])
def test_a_running_request_is_drafted_for_again_when_the_load_goes(loaded):
    """The draft catches up on what it missed under load: one long answer gets its speed back without a new request."""
    engine = SimulatedEngine(world(CPU, 0.8), controller(CPU), load=1, output=3000)
    assert mean_length(engine.run(60)[40:]) > 2
    engine.load, engine.output = 24, 40
    under_load = engine.run(loaded)[30:]
    assert not any(record.draft_plan.catch_up for record in under_load), "behind the closed gate nothing runs"
    engine.load = 1
    after = engine.run(150)
    assert {record.requests for record in after[100:]} == {1}
    assert sum(record.draft_plan.catch_up.get("request-1", 0) for record in after) > loaded / 2
    assert mean_length(after[100:]) > 2
    assert engine.controller.snapshot().caught_up_tokens > loaded / 2


def test_a_shift_to_text_that_the_draft_does_not_know_is_followed_within_fifty_steps():
    """Acceptance falls from 0.85 to 0.05 while speculating."""
    alpha = [0.85]
    truth = world(GPU, 0.0)
    truth.hazard["eagle"] = lambda *_: alpha[0]
    engine = SimulatedEngine(truth, controller(GPU), load=4, output=60)
    assert mean_length(engine.run(150)[50:]) > 2
    alpha[0] = 0.05
    engine.run(50)
    assert mean_length(engine.run(100)) < 0.3


@pytest.mark.parametrize("drafter", ["lookup", "eagle"])
def test_speculation_comes_back_by_itself_when_the_text_turns_easy(drafter):
    """From k = 0 the loop notices within 200 steps, through exploration alone; then new requests speculate."""
    alpha = [0.05]
    truth = world(CPU, 0.0)
    truth.hazard[drafter] = lambda *_: alpha[0]
    truth.hit["lookup"] = 0.9
    engine = SimulatedEngine(truth, controller(CPU, drafter), load=1, output=40)
    engine.run(300)
    assert mean_length(engine.run(100)) < 0.3
    alpha[0] = 0.85
    engine.run(200)
    assert mean_length(engine.run(60)) > 1.5


def test_a_draft_that_slows_three_times_while_serving_lowers_k():
    """Draft and target are corrected apart: one factor for both would change nothing."""
    truth = world(GPU, 0.7)
    engine = SimulatedEngine(truth, controller(GPU), load=4)
    before = mean_length(engine.run(150)[50:])
    truth.draft["eagle"] = DrafterCost(StepCost(per_batched_token_s=6e-6, constant_s=2.1e-3))
    engine.run(20)
    after = mean_length(engine.run(100))
    assert before > 1
    assert after < 0.75 * before


@pytest.mark.parametrize("load", [1, 8])
def test_a_poor_drafter_is_not_used_and_the_state_says_so(load):
    """A few of the target's own layers, accepted 6% of the time: NotWorthIt, at a percent or two of goodput."""
    truth = world(CPU, 0.06)
    engine = SimulatedEngine(truth, controller(CPU), load=load)
    engine.run(60)
    records = engine.run(700)
    assert np.mean([record.draft_tokens > 0 for record in records]) < 0.06
    assert engine.controller.snapshot().reason is Reason.NOT_WORTH_IT
    assert goodput(records) > 0.96 * static_goodput(truth, load, 0, steps=700)


def test_the_better_drafter_of_the_pool_is_found():
    """Lookup that hits 30% of the time against an EAGLE head that accepts 80%, and the other way round."""
    good = SimulatedEngine(world(GPU, 0.85), controller(GPU, "lookup", "eagle"), load=2)
    good.run(150)
    assert np.mean(["eagle" in record.drafters for record in good.run(150)]) > 0.8
    truth = world(GPU, 0.05)
    truth.hit["lookup"] = 0.9
    poor = SimulatedEngine(truth, controller(GPU, "lookup", "eagle"), load=2)
    poor.run(150)
    late = poor.run(150)
    assert np.mean(["lookup" in record.drafters for record in late]) > 0.8
    assert np.mean([record.ran_neural for record in late]) < 0.1


def test_what_the_model_does_not_know_is_found_by_the_probes():
    """Each speculative step costs 60 ms that no worker measures: probes switch speculation off, with back-off."""
    truth = world(GPU, 0.7, hidden_s=0.06)
    engine = SimulatedEngine(truth, controller(GPU), load=4)
    engine.run(300)
    assert engine.controller.snapshot().speedup.probes >= 1
    off = engine.run(700)
    assert np.mean([record.draft_tokens > 0 for record in off]) < 0.15
    assert engine.controller.snapshot().reason is Reason.NOT_WORTH_IT
    assert not engine.controller.snapshot().gated, "the threshold is for load; the guard does not move it"


def test_the_speedup_in_the_status_is_what_speculation_buys():
    """Probes against neighbours of the same batch agree with two whole runs, with and without speculation."""
    truth = world(GPU, 0.8)
    # One long generation each: no prefill, which probes leave out and whole runs do not.
    loop = controller(GPU)
    engine = SimulatedEngine(truth, loop, load=2, output=10_000, prompt=8)
    engine.run(50)
    speculative = engine.run(1500)
    plain_loop = controller(GPU)
    plain_loop.pin(0)
    plain = SimulatedEngine(truth, plain_loop, load=2, output=10_000, prompt=8).run(300)
    speedup = loop.snapshot().speedup
    measured = (speedup.speculative_tokens / speedup.speculative_s) / (speedup.baseline_tokens / speedup.baseline_s)
    assert speedup.probes >= 3
    assert measured == pytest.approx(goodput(speculative) / goodput(plain), rel=0.08)
    assert np.mean([record.draft_plan.purpose is Purpose.PROBE for record in speculative]) < 0.015
    assert loop.snapshot().reason is Reason.PAYS


def test_probes_are_blocks_whose_draft_kv_stays_whole():
    """At least four choices of k = 0 in a row, in which the draft's first pass still runs."""
    engine = SimulatedEngine(world(GPU, 0.8), controller(GPU), load=2, output=4000)
    records = engine.run(600)
    probing = [record.draft_plan.purpose is Purpose.PROBE for record in records]
    blocks = [len(list(group)) for value, group in itertools.groupby(probing) if value]
    assert blocks
    assert min(blocks) >= 4
    assert all(record.ran_neural for record, probe in zip(records, probing, strict=True) if probe)


def test_without_a_profile_the_draft_grows_one_token_beyond_what_was_tried():
    """With little data the controller stays close to what it has measured."""
    engine = SimulatedEngine(world(GPU, 0.95), controller(GPU, profile=False), load=1)
    longest = 1
    for record in engine.run(200):
        assert record.draft_tokens <= longest + 1
        longest = max(longest, record.verified)
    assert longest == MAX
    assert engine.controller.snapshot().learning


def test_counters_add_up():
    """Steps, tokens and lengths of the state are those of the engine."""
    engine = SimulatedEngine(world(GPU, 0.7), controller(GPU), load=3)
    records = engine.run(200)
    snapshot = engine.controller.snapshot()
    assert snapshot.steps == 200
    assert snapshot.output_tokens == sum(record.tokens for record in records)
    assert snapshot.busy_s == pytest.approx(sum(record.seconds for record in records))
    assert snapshot.speculative_steps == sum(record.verified > 0 for record in records)
    lengths = snapshot.draft_length_steps
    assert sum(length * count for length, count in enumerate(lengths)) == sum(record.verified for record in records)
    counters = snapshot.drafters["eagle"]
    assert counters.verified == sum(record.verified for record in records)
    assert 0 < counters.accepted <= counters.tried <= counters.verified
    assert snapshot.decision_s > 0
