"""Verdicts of the replay."""

from __future__ import annotations

import numpy as np
import pytest
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.step_times import DrafterCost, LatencyModel, StepCost
from outrider_runtime.simulate.replay.engine import ReplayEngine
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.workload import Workload

from bench.replay import bars, phases, plan, slo_mix, static_load, wrong_models
from bench.replay import pool as pools
from bench.replay.cells import Result, run
from bench.replay.settings import (
    BLOCK,
    BLOCK_TOKENS,
    Case,
    case_recording,
    plain_decoding,
    pool,
    recording,
    setting,
    singles,
    world,
)
from bench.replay.synthetic import MIXES


def test_a_bar_is_judged_where_one_seed_in_twenty_is_worse():
    """Not on the mean: one lucky seed must not carry a bar."""
    ratios = [1.2] * 18 + [0.5, 0.5]
    assert bars.low_quantile(ratios) < 0.98 < float(np.mean(ratios))


def test_the_best_static_setting_is_chosen_on_means():
    """If it were chosen again for each seed, it would gain from noise."""
    figures = {"steady": [10.0, 10.0, 10.0], "lucky once": [12.0, 8.0, 8.0]}
    assert bars.best_on_means(figures) == "steady"


def judged(ours, adaptive, best="eagle, k = 3") -> static_load.Judged:
    figures = {"ours": ours, "plain": [1.0] * len(ours), best: [1.0] * len(ours), "adaptive verification": adaptive}
    return static_load.Judged(static_load.Point(Case("llama-3.1-8b-h200", 0.5), 8), figures, best)


def test_point_below_the_static_bar_is_missed_despite_the_mean():
    verdict_bars = static_load.bars([judged([0.9, 0.9], [0.5, 0.5]), judged([1.5, 1.5], [0.5, 0.5])])
    verdicts = {(bar.name, bar.holds) for bar in verdict_bars}
    assert ("1 static load", False) in verdicts
    assert ("1 static load, geometric mean", True) in verdicts


def test_adaptive_bar_is_5_percent_higher_if_no_draft_pays():
    verdict_bars = static_load.bars([judged([1.03, 1.03], [1.0, 1.0], best="plain")])
    verdict = next(bar for bar in verdict_bars if bar.name == "6 adaptive verification")
    assert not verdict.holds
    assert verdict.least == pytest.approx(1.05)


def test_a_wrong_profile_is_wrong_by_what_the_bar_says():
    """Drafts that cost 1.5 times what the profile says, and a knee that comes 30% later."""
    step = StepCost(per_batched_token_s=1e-5, per_batched_token_above_knee_s=1e-5, knee_tokens=100.0, constant_s=6e-3)
    model = LatencyModel({ExecutionMode.UNIFORM: step}, {"eagle": DrafterCost(step)})
    assert wrong_models.move_knee(model).target[ExecutionMode.UNIFORM].knee_tokens == pytest.approx(130.0)
    wrong = wrong_models.understate_drafts(model).drafters["eagle"].cost
    assert wrong.constant_s == pytest.approx(4e-3)
    assert wrong.knee_tokens == 100.0


class RecordingPolicy:
    """A policy that never speculates, and keeps the outcomes that it observed."""

    def __init__(self, drafters):
        self.policy, self.outcomes = Fixed(drafters), []

    def observe(self, outcome):
        self.outcomes.append(outcome)

    def __getattr__(self, name):
        return getattr(self.policy, name)


def test_unreported_time_is_in_the_clock_but_not_in_the_passes():
    case = Case("llama-3.1-8b-h200", 0.5)
    recorder = RecordingPolicy(pool(case))
    policy = wrong_models.Unreported(recorder, np.random.default_rng(0))
    engine = ReplayEngine(setting(case, plain_decoding()), static_load.load(static_load.Point(case, 2), 0), policy)
    engine.run(until_s=0.2)
    shares = np.array([outcome.target_s / outcome.step_s for outcome in recorder.outcomes])
    assert ((shares >= 0.85 - 1e-9) & (shares <= 0.95 + 1e-9)).all()
    assert np.ptp(shares) > 0.02


def result(**columns) -> Result:
    nothing = np.zeros(3)
    columns = {
        "ttft_s": nothing, "tpot_s": nothing, "slo_class": np.zeros(3, np.int64), "done_s": nothing,
        "arrived_s": nothing,
    } | columns  # fmt: skip
    return Result(goodput=1.0, latency_s=1.0, draft_length=0.0, steps=1, **columns)


def test_request_that_misses_ttft_is_a_miss_at_any_tpot():
    replayed = result(ttft_s=np.array([0.1, 99.0, 0.1]), tpot_s=np.full(3, 0.001), slo_class=np.array([0, 0, 1]))
    assert slo_mix.attainment(replayed, slo_mix.classes(step_s=0.01)) == pytest.approx(2 / 3)


def shift(*of: phases.Phase) -> phases.Shift:
    return phases.Shift("s", Case("llama-3.1-8b-h200", None), of)


def test_a_shift_keeps_its_prompts_in_their_phase():
    """Each phase's requests come in it, and ask what its group asks."""
    two_phases = shift(phases.Phase(5.0, 8.0, "chat"), phases.Phase(5.0, 8.0, "reading"))
    load = phases.load(two_phases, seed=3)
    real = recording(None)
    groups = real.group[load.answer]
    early = load.at_s < 5.0
    assert (groups[early] == real.groups.index("chat")).all()
    assert (groups[~early] == real.groups.index("reading")).all()
    assert len(phases.load(two_phases, 3)) == len(load)


def test_overloaded_phase_is_judged_by_goodput_others_by_latency():
    two_phases = shift(phases.Phase(10.0, 1.0), phases.Phase(10.0, 9.0, overloaded=True))
    columns = np.full(3, 60), np.array([7, 7, 50]), np.full(3, -1), np.zeros(3, np.int64)
    load = Workload(np.array([1.0, 2.0, 15.0]), *columns)
    replayed = result(arrived_s=load.at_s, done_s=np.array([2.0, 5.0, 35.0]))
    assert phases.speeds(two_phases, load, replayed) == pytest.approx([1 / 2.0, 50 / 25.0])


def test_trace_arrivals_keep_order_and_fill_their_windows():
    traced = plan.trace("llama-3.1-8b-a100", 0.7)
    at_s = np.array(traced.arrivals_s)
    assert (np.diff(at_s) >= 0).all()
    assert at_s[-1] <= traced.ends_s()[-1]
    counts = np.histogram(at_s, bins=[0.0, *traced.ends_s()])[0]
    expected = [phase.rate_per_s * phase.seconds for phase in traced.phases]
    assert counts == pytest.approx(expected, abs=2)


@pytest.mark.slow
def test_in_a_mix_each_group_accepts_what_suits_it():
    """The drafter that a group is said to suit proposes best there."""
    mix = MIXES["two models suit one group each"]
    made = recording(mix="two models suit one group each")
    group = np.repeat(made.group, np.diff(made.start))
    for name in mix.pool:
        first = made.depth[made.drafters.index(name)] > 0
        shares = {label: first[group == place].mean() for place, label in enumerate(made.groups)}
        assert shares == pytest.approx({label: mix.suits[label][name] for label in made.groups}, abs=0.12)


@pytest.mark.slow
def test_oracle_uses_the_drafter_of_each_requests_group():
    case = Case("llama-3.1-8b-h200", mix="a lookup suits reading")
    seen: list[tuple[int, int]] = []

    class Watched(pools.PerRequest):
        def plan_draft(self, batch):
            made = super().plan_draft(batch)
            seen.extend(zip(batch.slo_class.tolist(), made.drafter_order[0].tolist(), strict=True))
            return made

    policy = Watched(pool(case), np.array([0, 0, 1]), np.array([3, 5]))
    ReplayEngine(setting(case, plain_decoding()), pools.load(case, 12, 0, knows_classes=True), policy).run(until_s=0.5)
    assert {(0, 0), (2, 1)} <= set(seen) <= {(0, 0), (1, 0), (2, 1)}


def test_block_head_is_replayed_from_its_own_recording():
    """It proposes a block of four and no more, lifted or not; no setting asks it for more."""
    for case, _ in plan.block_pools():
        made = case_recording(case)
        assert {drafter.name for drafter in pool(case)} <= {*made.drafters} & {*world(case.world).drafters}
        assert (made.proposed[made.drafters.index(BLOCK)] == BLOCK_TOKENS).all()
        assert (made.depth <= made.proposed).all()
        assert {name for name in singles(case) if name.startswith(BLOCK)} == {f"block, k = {k}" for k in (1, 2, 3, 4)}


def test_block_head_pools_are_judged_by_point_and_on_average():
    case = Case("llama-3.1-8b-h200", drafters=("block", "lookup"))
    judged = [pools.Pooled(case, 8, {"plain": [2.0, 2.0], "ours": [ours, ours]}, "plain", None) for ours in (1.97, 2.1)]
    verdicts = pools.block_bars(judged)
    assert [bar.value for bar in verdicts] == pytest.approx([0.985, 1.05, (0.985 * 1.05) ** 0.5])
    assert [bar.least for bar in verdicts] == [0.98, 0.98, 1.0]


@pytest.mark.slow
def test_static_load_is_judged_after_each_clients_first_request():
    """What is learned from nothing, and prompts that all come at once, are no static load."""
    case = Case("llama-3.1-8b-h200", 0.5)
    load = static_load.load(static_load.Point(case, 4), 0)
    engine = ReplayEngine(setting(case, plain_decoding()), load, Fixed(pool(case)))
    engine.run()
    first_s = engine.requests.done_s[:4].max()
    served = [
        at > first_s and requests == 4 for at, requests in zip(engine.log.output_at_s, engine.log.requests, strict=True)
    ]
    last = max(place for place, there in enumerate(served) if there) + 1
    inside = [place for place in range(last) if engine.log.output_at_s[place] > first_s]
    expected = sum(engine.log.tokens[place] for place in inside) / sum(engine.log.step_s[place] for place in inside)
    assert run(case, plain_decoding(), load, 0).goodput == pytest.approx(expected)


def test_no_plan_asks_for_more_cells_than_twenty_minutes_hold():
    """Eight thousand: a point has eleven others and three that are judged with every seed."""
    size = plan.DEFAULT
    static = len(plan.points(size)) * (11 * size.screening + 3 * (size.seeds - size.screening) + size.seeds)
    others = len(plan.mixes(size)) * 300 + len(plan.wrong_points(size)) * 4 * size.fewer + len(plan.pools()) * 100
    assert static + others <= 8000
