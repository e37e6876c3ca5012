"""The replay: vLLM's scheduling on a virtual clock, with what drafters really proposed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.batch import NO_CLASS
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter, Settings
from outrider_runtime.control.step_times import Shape
from outrider_runtime.loop.draft_caches import UNFILLABLE_GAP_TOKENS
from outrider_runtime.simulate import recording as recordings
from outrider_runtime.simulate.replay.engine import Policy, ReplayEngine, Setting
from outrider_runtime.simulate.replay.fitted_profile import fit_profile
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.recorded_proposals import mean_acceptance_rates
from outrider_runtime.simulate.replay.step_scheduler import Limits
from outrider_runtime.simulate.replay.workload import (
    Lengths,
    Workload,
    draw_classes,
    draw_closed_load,
    open_load,
    poisson,
)
from outrider_runtime.simulate.worlds import world as worlds
from outrider_runtime.simulate.worlds.world import BlockPass, Pass

from bench.replay.adaptive import Adaptive, cost_tables
from bench.replay.baselines import ByBatchSize, tuned_table

EAGLE = Drafter("eagle", passes=True, needs_hidden=True)
LOOKUP = Drafter("lookup")
DRAFT = Drafter("draft", passes=True, needs_kv=True)
POOL = (EAGLE, LOOKUP, DRAFT)
WORLD = worlds.load("llama-3.1-8b-h100")
RECORDED = recordings.load_shipped()
LIFTED = recordings.lift(RECORDED, 0.7, seed=0)


def setting(recording=LIFTED, limits: Limits | None = None) -> Setting:
    return Setting(WORLD, recording, POOL, limits or Limits())


def policies() -> dict[str, Policy]:
    return {
        "plain": Fixed(POOL),
        "eagle": Fixed(POOL, 0, 3),
        "lookup": Fixed(POOL, 1, 5),
        "draft": Fixed(POOL, 2, 2),
        "table": ByBatchSize(POOL, 0, tuned_table(WORLD, LIFTED, "eagle", 5)),
        "adaptive": Adaptive(POOL, 0, 5, cost_tables(WORLD, "eagle", 5, 256), Limits().slots),
    }


def ran(policy: Policy, load: Workload, where: Setting | None = None) -> ReplayEngine:
    engine = ReplayEngine(where or setting(), load, policy)
    engine.run()
    return engine


def static(requests: int, seed: int = 0) -> Workload:
    return draw_closed_load(requests, 3 * requests + 6, LIFTED, None, np.random.default_rng(seed), Lengths(300, 64))


def goodput(engine: ReplayEngine) -> float:
    return sum(engine.log.tokens) / engine.now


@pytest.mark.slow
@given(st.integers(0, 10_000), st.sampled_from(list(policies())), st.sampled_from([400, 4000, 1 << 20]))
@settings(max_examples=25, deadline=None)
def test_requests_get_their_tokens_under_any_policy_and_memory(seed, name, kv_tokens):
    """Continuous batching, chunks and preemption lose no token and make none up."""
    rng = np.random.default_rng(seed)
    load = open_load(poisson(40.0, 12, rng), LIFTED, None, rng, Lengths(120, 24))
    limits = Limits(
        token_budget=256, max_requests=6, kv_tokens=max(kv_tokens, int((load.prompt + load.output).max()) + 64)
    )
    engine = ran(policies()[name], load, setting(limits=limits))
    assert (engine.requests.produced == load.output).all()
    assert (engine.requests.done_s >= engine.requests.first_s).all()
    assert (engine.requests.first_s > load.at_s).all()
    assert sum(engine.log.tokens) == load.output.sum()


@pytest.mark.slow
def test_requests_with_patience_are_admitted_by_deadline():
    """Ours lets in by deadline, as the runtime does; without a patience it is first come, first served."""
    rng = np.random.default_rng(3)
    load = draw_classes(open_load(poisson(400.0, 60, rng), LIFTED, None, rng, Lengths(200, 32)), np.full(2, 0.5), rng)
    small = setting(limits=Limits(max_requests=4))
    by_due = ran(Fixed(POOL), load, replace(small, patience_s=(0.01, 10.0))).requests
    in_order = ran(Fixed(POOL), load, small).requests
    tight = load.slo_class == 0
    assert by_due.first_s[tight].max() < np.median(by_due.first_s[~tight])
    assert (np.diff(in_order.first_s) >= 0).all()


def test_policy_knows_how_long_prompts_have_waited():
    """Overdue requests are admitted, and a request whose patience is nearly used is not held back."""
    seen = []

    class Watching(Fixed):
        def plan_verify(self, batch, forest):
            seen.append((batch.patience_used, batch.next.overdue if batch.next else None))
            return super().plan_verify(batch, forest)

    rng = np.random.default_rng(3)
    load = draw_classes(open_load(poisson(400.0, 20, rng), LIFTED, None, rng, Lengths(200, 32)), np.full(1, 1.0), rng)
    ran(Watching(POOL), load, replace(setting(limits=Limits(max_requests=2)), patience_s=(0.1,)))
    used, overdue = zip(*seen, strict=True)
    assert max(used) > 1.0
    assert {True, False} <= set(overdue)
    assert all(share >= 1.0 for share, late in seen if late)


def test_the_same_seed_gives_the_same_run():
    assert ran(Fixed(POOL, 0, 3), static(16)).log == ran(Fixed(POOL, 0, 3), static(16)).log


def test_speculation_pays_at_one_request_and_costs_at_many():
    """The crossover that the loop is for, on the composed H100 with half of the first proposals accepted."""
    half = setting(recordings.lift(RECORDED, 0.5, seed=0))
    gain = {
        n: goodput(ran(Fixed(POOL, 0, 5), static(n), half)) / goodput(ran(Fixed(POOL), static(n), half))
        for n in (1, 128)
    }
    assert gain[1] > 1.2
    assert gain[128] < 1.0


def test_the_target_accepts_as_often_as_it_was_recorded():
    """Accepted / verified at k = 1 is the recording's first acceptance rate over the replayed answers."""
    load = static(24)
    log = ran(Fixed(POOL, 0, 1), load).log
    expected = mean_acceptance_rates(LIFTED, "eagle")[0]
    assert sum(log.accepted) / sum(log.verified) == pytest.approx(expected, abs=0.06)


def test_draft_model_is_fed_before_it_proposes():
    """Its proposals count over a whole cache: a plan that feeds it nothing beforehand costs time, not acceptance."""

    class Unfed(Fixed):
        def plan_draft(self, batch):
            plan = super().plan_draft(batch)
            return replace(plan, feed=plan.feed * 0)

    fed, unfed = ran(Fixed(POOL, 2, 2), static(4)).log, ran(Unfed(POOL, 2, 2), static(4)).log
    assert sum(unfed.accepted) == sum(fed.accepted) > 0


@pytest.mark.slow
def test_adaptive_verification_scores_fewer_expensive_tokens():
    """Like vLLM's: all K are drafted, and few of them are verified at 128 requests."""
    few, many = (ran(policies()["adaptive"], static(n)).log for n in (1, 128))
    share = [sum(log.verified) / sum(log.requests) for log in (few, many)]
    assert share[1] < 0.8 * share[0]


def test_adaptive_verification_takes_prompts_longer_than_a_step():
    """A prompt of 30,000 tokens is prefilled in chunks of 8,192, together with decoding requests."""
    load = static(3)
    load.prompt[:] = (100, 200, *[30_000] * (len(load) - 2))
    engine = ran(policies()["adaptive"], load)
    assert (engine.requests.produced == load.output).all()


def test_a_tuned_table_speculates_less_as_the_batch_grows():
    table = tuned_table(WORLD, LIFTED, "eagle", 5)
    assert table[0] > table[127]


def test_lifted_recordings_accept_what_they_are_named_after():
    for share in (0.5, 0.7, 0.9):
        lifted = recordings.lift(RECORDED, share, seed=1)
        assert mean_acceptance_rates(lifted, "eagle")[0] == pytest.approx(share, abs=0.06)
        assert mean_acceptance_rates(lifted, "eagle/no-prompt")[0] < mean_acceptance_rates(lifted, "eagle")[0]
        assert (
            lifted.depth[lifted.drafters.index("lookup")] == RECORDED.depth[RECORDED.drafters.index("lookup")]
        ).all()


def test_a_recording_survives_its_file(tmp_path):
    RECORDED.save(tmp_path / "recording.npz")
    again = recordings.load(tmp_path / "recording.npz")
    assert (again.depth == RECORDED.depth).all()
    assert again.drafters == RECORDED.drafters


def test_file_that_is_no_recording_is_refused_with_missing_parts(tmp_path):
    np.savez(tmp_path / "other.npz", drafters=np.array(["eagle"]))
    with pytest.raises(ValueError, match="lacks"):
        recordings.load(tmp_path / "other.npz")


def test_requests_without_a_class_say_so():
    assert (static(2).slo_class == NO_CLASS).all()


@pytest.mark.slow
def test_full_memory_leaves_room_for_drafts_in_held_blocks():
    """More comes in than is served, and no block is free for long: what is proposed must not wait for that."""
    rng = np.random.default_rng(5)
    small = setting(limits=Limits(kv_tokens=4000))
    load = open_load(np.zeros(150), LIFTED, None, rng, Lengths(40, 96))
    latency = fit_profile(WORLD, POOL, np.random.default_rng(0))
    loop = Controller(
        Settings(POOL, 5, small.limits.slots, largest_graph_tokens=WORLD.graph_tokens),
        latency,
        clock=time.perf_counter,
        rng=rng,
    )
    log = ran(loop, load, small).log
    assert sum(log.verified) > 1.5 * sum(log.requests)


@pytest.mark.slow
def test_the_profile_is_measured_as_far_as_requests_go():
    """The simulated profile covers contexts up to maxModelLen, like outrider-profile.

    Bug: steps over 8,000 tokens were estimated a fifth too short."""
    world, shape = worlds.load("llama-3.1-8b-8xa100-long"), Shape(64 * 8000.0, 64, 64, 64 * 8.0)
    seconds = world.target_s(Pass(64, 64, 8000, 64))
    costs = [
        fit_profile(world, (), np.random.default_rng(0), longest).target[ExecutionMode.UNIFORM]
        for longest in (4096, 32_768)
    ]
    assert costs[0].seconds(shape) < 0.85 * seconds
    assert costs[1].seconds(shape) == pytest.approx(seconds, rel=0.05)


def test_drafter_with_cost_per_request_is_profiled_with_it():
    """The fit takes the smallest form that holds, like outrider-profile. Bug: a head on CPUs was up to a quarter
    more expensive than its profile said."""
    world = worlds.load("smollm2-135m-cpu")
    cost = fit_profile(world, (EAGLE,), np.random.default_rng(0)).drafters["eagle"]
    for requests in (1, 6, 24, 96):
        seconds = world.draft_s("eagle", Pass(requests, requests, 600, requests), 3)
        assert cost.seconds(Shape(requests * 600, requests, requests, requests * 0.6), 3) == pytest.approx(
            seconds, rel=0.05
        )


class Watched:
    """A policy, with what passes between it and the engine, in order."""

    def __init__(self, policy):
        self.policy, self.forests, self.outcomes, self.calls = policy, [], [], []

    def plan_verify(self, batch, forest):
        self.calls.append("verify")
        self.forests.append(forest)
        return self.policy.plan_verify(batch, forest)

    def observe(self, outcome):
        self.calls.append("observe")
        self.outcomes.append(outcome)
        self.policy.observe(outcome)

    def __getattr__(self, name):
        return getattr(self.policy, name)


def watched(*, asynchronous: bool, policy: Policy | None = None) -> tuple[Watched, ReplayEngine]:
    policy = Watched(policy or Fixed(POOL, 1, 4))
    return policy, ran(policy, static(4), replace(setting(), asynchronous=asynchronous))


def test_replay_asynchronous_lookup_plans_see_placeholders():
    """Bug: the replay showed the hits of a lookup that vLLM does not know yet, so plans looked better than on GPUs."""
    late, _ = watched(asynchronous=True)
    lengths = [np.bincount(forest.request, minlength=forest.drafter_order.shape[1]) for forest in late.forests]
    assert set(np.concatenate(lengths).tolist()) == {4}
    assert all(np.isnan(forest.confidence).all() for forest in late.forests)
    early, _ = watched(asynchronous=False)
    known = np.concatenate([np.bincount(forest.request) for forest in early.forests])
    assert {1, 2, 3} & set(known.tolist())


def test_replay_asynchronous_outcome_holds_what_was_proposed():
    """The report of a step later says which placeholders held a proposal, and how long its match was."""
    late, engine = watched(asynchronous=True)
    scored = sum(int(outcome.verified.sum()) for outcome in late.outcomes)
    assert scored == sum(engine.log.verified)
    assert sum(int(outcome.accepted.sum()) for outcome in late.outcomes) == sum(engine.log.accepted)
    ordered = sum(len(forest) for forest in late.forests)
    assert 0 < scored < 0.8 * ordered
    matched = np.concatenate([outcome.forest.confidence for outcome in late.outcomes])
    assert (matched >= 2).all()


@pytest.mark.parametrize(("asynchronous", "behind"), [(False, 1), (True, 3)])
def test_replay_observes_steps_as_late_as_the_engine(asynchronous, behind):
    """The output of t arrives after the plan of t+1, and the report on its drafting after the plan of t+2."""
    policy, _ = watched(asynchronous=asynchronous)
    planned = np.cumsum([call == "verify" for call in policy.calls])
    observed = np.cumsum([call == "observe" for call in policy.calls])
    assert (planned - observed).max() == behind


def test_replay_asynchronous_placeholder_costs_a_whole_token():
    """A place that no lookup fills is run by the target all the same."""
    half = setting(recordings.lift(RECORDED, 0.5, seed=0))
    seconds = {}
    for asynchronous in (False, True):
        log = ran(Fixed(POOL, 1, 5), static(128), replace(half, asynchronous=asynchronous)).log
        full = [at for at, requests in enumerate(log.requests) if requests == 128]
        seconds[asynchronous] = float(np.median([log.step_s[at] for at in full]))
    assert seconds[True] > 1.1 * seconds[False]


def test_replay_slot_is_free_after_its_last_outcome():
    """A slot is taken again only after the last step of its former request was observed."""
    rng = np.random.default_rng(5)
    small = setting(limits=Limits(max_requests=6, kv_tokens=400))
    load = open_load(np.zeros(40), LIFTED, None, rng, Lengths(40, 24))
    taken: dict[int, int] = {}

    class Slots(Watched):
        def plan_draft(self, batch):
            for slot in batch.slot.tolist():
                taken.setdefault(slot, len(self.outcomes))
            return self.policy.plan_draft(batch)

        def observe(self, outcome):
            assert set(outcome.batch.slot.tolist()) <= set(taken)
            super().observe(outcome)

        def release(self, slots):
            for slot in slots.tolist():
                del taken[slot]
            self.policy.release(slots)

    engine = ran(Slots(Fixed(POOL, 0, 3)), load, small)
    assert engine.requests.preemptions > 0
    assert not taken
    assert sum(engine.log.tokens) == load.output.sum()


BLOCK = Drafter("block", needs_kv=True, needs_hidden=True)
BLOCK_TOKENS = 5
EAGLE_TIMES: Any = WORLD.drafters["eagle"]


def with_a_block_drafter(recording=LIFTED, **limits) -> Setting:
    """A block drafter that is as often right as the recorded head, and prompt lookup."""
    names = {"block": "eagle", "lookup": "lookup"}
    times = {"block": BlockPass(EAGLE_TIMES, BLOCK_TOKENS), "lookup": WORLD.drafters["lookup"]}
    columns = recordings.rename_for_pool(recording, names, dict.fromkeys(names), seed=0)
    return Setting(replace(WORLD, drafters=times), columns, (BLOCK, LOOKUP), Limits(**limits))


def test_block_drafter_has_one_price_for_any_length():
    times = BlockPass(EAGLE_TIMES, BLOCK_TOKENS)
    step = Pass(64, 64, 500.0, 64)
    assert times.ms(step, 1) == times.ms(step, BLOCK_TOKENS)
    assert times.ms(step, 0) < 0.1 * times.ms(step, 1), "it is fed alone"


def test_block_drafter_never_closes_a_gap():
    """Bug: the replay closed gaps of a block drafter as those of a draft model, though hidden states are gone."""

    class Late(Fixed):
        """Feeds the block drafter from the tenth step on."""

        steps = 0

        @property
        def fed_blocks(self):
            return np.array([self.steps > 10, False])

        def plan_draft(self, batch):
            self.steps += 1
            plan = super().plan_draft(batch)
            return plan if self.steps > 10 else replace(plan, passes=0 * plan.passes, feed=0 * plan.feed)

    where, load = with_a_block_drafter(), static(4)
    first, later = load.at_s.argsort()[:4], load.at_s.argsort()[4:]
    engine = ran(Late((BLOCK, LOOKUP), 0, 3), load, where)
    has_gap = engine._device.caches._has_gap[0]
    assert has_gap[first].all()
    assert not has_gap[later].any()


def test_rejected_proposals_in_flight_are_no_block_gap():
    """Bug: the scheduler counts proposals in flight as accepted, and one that was rejected looked like a gap to the
    policy, for almost every request. So a block drafter that was fed in every step was hardly ever used."""
    lacked = list[int]()

    class Watched(Fixed):
        fed_blocks = np.array([True, False])

        def plan_draft(self, batch):
            lacked.append(int(batch.missing[0].max()))
            return super().plan_draft(batch)

    load, where = static(4), with_a_block_drafter()
    engine = ran(Watched((BLOCK, LOOKUP), 0, 3), load, where)
    assert where.asynchronous
    assert sum(engine.log.verified) > sum(engine.log.accepted)
    assert max(lacked) < UNFILLABLE_GAP_TOKENS


@pytest.mark.slow
def test_loop_uses_a_block_drafter_in_the_replay():
    """A block pays at two requests. The loop feeds it from the first prompt on, since gaps stay."""
    where, rng = with_a_block_drafter(), np.random.default_rng(0)
    loop = Controller(
        Settings((BLOCK, LOOKUP), BLOCK_TOKENS, Limits().slots), fit_profile(where.world, where.drafters, rng),
        clock=time.perf_counter, rng=rng,
    )  # fmt: skip
    plain = goodput(ran(Fixed((BLOCK, LOOKUP)), static(2), where))
    assert goodput(ran(loop, static(2), where)) > 1.2 * plain
