"""What a hole in its KV costs an EAGLE head: measured, and prompts are read where it costs more than reading."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from outrider_runtime.control.batch import Batch, DraftPlan, ExecutionMode, RequestOutcome, RequestView
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.costs import DrafterCost, LatencyModel, StepCost
from outrider_runtime.control.holes import ENOUGH_TRIALS, SHARE_AFTERWARDS, SHARE_TO_LEARN, HoleCost
from outrider_runtime.control.settings import DrafterSpec, DraftPrefill, HotSettings, Settings

from tests.unit.control.simulated_engine import SimulatedEngine, World, goodput

TARGET = StepCost(per_context_token_s=2e-6, per_batched_token_s=2e-3, constant_s=12.5e-3)
HEAD = DrafterCost(StepCost(per_batched_token_s=3e-4, constant_s=1.5e-3))
MAX = 4


def prompt(name: str) -> RequestView:
    return RequestView(name, None, 0, 30, 0, 0, 50, 0.0, draft_ready=True)


def outcome(name: str, *, accepted: bool) -> RequestOutcome:
    return RequestOutcome(name, None, "head", 1, 1, 1, int(accepted))


def learned(whole: float, unread: float, trials: int = 800) -> HoleCost:
    """After so many trials of either kind, accepted in these shares."""
    cost = HoleCost("head", np.random.default_rng(0))
    cost.ran([prompt("read")], neural=True)
    cost.ran([prompt("not read")], neural=False)
    cost.ran([prompt("read")], neural=True)
    for number in range(trials):
        cost.observe([outcome("read", accepted=number % 20 < 20 * whole)])
        cost.observe([outcome("not read", accepted=number % 20 < 20 * unread)])
    return cost


def share_read(cost: HoleCost, prompts: int = 2000) -> float:
    return sum(cost.reads_next_prompt() for _ in range(prompts)) / prompts


@pytest.mark.parametrize(("unread", "matter"), [(0.5, False), (0.45, False), (0.3, True), (0.0, True)])
def test_a_loss_beyond_doubt_makes_holes_matter(unread, matter):
    """A head that may lose a tenth reads hardly a prompt, one that loses more reads all."""
    cost = learned(0.5, unread)
    assert cost.matter == matter
    assert share_read(cost) == pytest.approx(1.0 if matter else SHARE_AFTERWARDS, abs=0.02)


def test_where_holes_matter_requests_with_one_are_not_drafted_for():
    """Or the head's acceptance over holes would hide what it can do, and the gate would never open."""
    old = [prompt(name)._replace(context_tokens=30, prefill_tokens=0) for name in ("read", "not read")]
    batch = Batch((prompt("new"), *old), 1.0, 2048, 10_000)
    ready = {view.id: view.draft_ready for view in learned(0.5, 0.1).with_holes(batch).requests}
    assert ready == {"new": True, "read": True, "not read": False}
    assert learned(0.5, 0.5).with_holes(batch) == batch


def test_a_stranger_reads_some_prompts_and_skips_others():
    """Neither kind is favoured before both are known; a loss that is plain to see needs fewer trials than none."""
    cost = HoleCost("head", np.random.default_rng(0))
    assert not cost.matter
    assert share_read(cost) == pytest.approx(SHARE_TO_LEARN, abs=0.05)
    assert share_read(learned(0.5, 0.5, trials=100)) == pytest.approx(SHARE_TO_LEARN, abs=0.05)
    assert learned(0.7, 0.2, trials=40).matter


def test_only_a_request_whose_kv_is_whole_speaks_for_reading():
    """Bug: one step without the head, and a request with a hole is counted as whole."""
    cost = HoleCost("head", np.random.default_rng(0))
    cost.ran([prompt("read"), prompt("forgotten")], neural=True)
    cost.ran([prompt("read")._replace(context_tokens=30, prefill_tokens=0)], neural=False)
    cost.ran([prompt("skipped")], neural=False)
    cost.ran([prompt("skipped")._replace(context_tokens=30)], neural=True)
    cost.forget("forgotten")
    for _ in range(round(ENOUGH_TRIALS)):
        cost.observe([outcome(name, accepted=False) for name in ("read", "skipped", "forgotten", "unknown")])
    assert cost._whole.tried == 0
    assert cost._unread.tried == ENOUGH_TRIALS


def test_a_prompt_in_chunks_or_from_the_prefix_cache_is_whole_where_the_rest_was_read():
    """Bug: every request behind a shared system prompt counts as one with a hole, and is never drafted for."""
    cost = learned(0.5, 0.1)
    cached = prompt("cached")._replace(context_tokens=64)
    cost.ran([cached, prompt("chunks")], neural=True)
    cost.ran([prompt("chunks")._replace(context_tokens=30)], neural=True)
    cost.ran([prompt("late"), prompt("broken")], neural=True)
    decoding = [prompt(name)._replace(context_tokens=99, prefill_tokens=0) for name in ("cached", "chunks")]
    batch = Batch(tuple(decoding), 1.0, 2048, 10_000)
    assert all(view.draft_ready for view in cost.with_holes(batch).requests)
    cost.ran([prompt("broken")._replace(context_tokens=30)], neural=False)
    cost.ran([prompt("broken")._replace(context_tokens=60)], neural=True)
    broken = Batch((prompt("broken")._replace(context_tokens=90, prefill_tokens=0),), 1.0, 2048, 10_000)
    assert not cost.with_holes(broken).requests[0].draft_ready
    cost.ran([prompt("broken")], neural=True)
    assert cost.with_holes(broken).requests[0].draft_ready, "preempted, and read again from its beginning"


class Prompts(Controller):
    """Notes which requests' prompts were read by the head."""

    read: dict[int, bool]

    def plan_draft(self, batch: Batch) -> DraftPlan:
        plan = super().plan_draft(batch)
        for view in batch.requests:
            if view.prefill_tokens and not view.context_tokens:
                self.read[int(view.id.split("-")[1])] = plan.run_neural
        return plan

    def share_read_since(self, first: int) -> float:
        return float(np.mean([read for number, read in self.read.items() if number >= first]))


def served(unread_hazard: float, **hot: object) -> tuple[SimulatedEngine, Prompts]:
    """An engine whose head accepts 0.7 a position, and this where it has not read the prompt."""
    ticks = itertools.count()
    latency = LatencyModel(dict.fromkeys(ExecutionMode, TARGET), {"head": HEAD})
    loop = Prompts(
        Settings((DrafterSpec("head", neural=True, needs_whole_kv=False),), MAX,
                 hot=HotSettings(max_draft_tokens=MAX, **hot)),  # type: ignore[arg-type]
        latency, clock=lambda: next(ticks) * 1e-6, rng=np.random.default_rng(0),
    )  # fmt: skip
    loop.read = {}
    world = World(
        TARGET, {"head": HEAD}, {"head": lambda _, number: 0.7 if loop.read.get(number, True) else unread_hazard},
        neural="head",
    )  # fmt: skip
    world.holes_matter = False
    return SimulatedEngine(world, loop, load=2, prompt=200, output=30), loop


def test_a_head_that_does_not_need_the_prompt_stops_reading_it():
    """That time belongs to the users: more goodput than with draftPrefill: Always, which reads every prompt."""
    engine, loop = served(0.7)
    engine.run(600)
    first = max(loop.read)
    later = goodput(engine.run(600))
    assert loop.share_read_since(first) < 0.2
    always, _ = served(0.7, draft_prefill=DraftPrefill.ALWAYS)
    always.run(600)
    assert later > 1.05 * goodput(always.run(600))


def test_a_prompt_in_tow_stops_the_head_for_its_own_step_only():
    """Bug: nothing was proposed beside a prompt that the head would have had to read, and that choice was kept for
    seven steps more: half of a short answer."""
    engine, _ = served(0.7)
    engine.load = 4
    engine.run(600)
    assert np.mean([record.draft_tokens > 0 for record in engine.run(400)]) > 0.7


def test_that_nothing_is_proposed_for_an_answer_about_to_end_says_nothing_of_the_next():
    """Bug: that choice was kept for whoever came next: the first seven steps of each answer, with one at a time."""
    engine, _ = served(0.9)
    engine.load = 1
    engine.run(600)
    assert np.mean([record.draft_tokens > 0 for record in engine.run(400)]) > 0.6


def test_a_head_that_needs_the_prompt_goes_on_reading_it():
    """Bug: a head that another trained differently loses its acceptance, and nobody notices."""
    engine, loop = served(0.2)
    engine.run(1500)
    first = max(loop.read)
    later = goodput(engine.run(600))
    assert loop.share_read_since(first) > 0.8
    always, _ = served(0.2, draft_prefill=DraftPrefill.ALWAYS)
    always.run(600)
    assert later > 0.95 * goodput(always.run(600))
