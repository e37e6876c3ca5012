"""Verdicts of the replay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.replay import bars, phases, slo_mix, static_load
from tests.benchmarks.replay.cells import Result
from tests.benchmarks.replay.settings import Case


def test_a_bar_is_judged_where_one_seed_in_twenty_is_worse():
    """Not on the mean: one lucky seed must not carry a bar."""
    ratios = [1.2] * 18 + [0.5, 0.5]
    assert bars.low(ratios) < 0.98 < float(np.mean(ratios))


def test_the_best_static_setting_is_chosen_on_means():
    """Picked anew for each seed it would gain from noise."""
    figures = {"steady": [10.0, 10.0, 10.0], "lucky once": [12.0, 8.0, 8.0]}
    assert bars.best_on_means(figures) == "steady"


@given(st.floats(0.5, 2.0), st.floats(0.1, 1.0), st.floats(0.0, 1.0))
def test_the_share_of_the_gap_is_none_at_the_single_and_all_at_the_oracle(single, gap, share):
    assert bars.closed_gap(single + share * gap, single, single + gap) == pytest.approx(share, abs=1e-9)


def judged(ours, adaptive, best="eagle, k = 3") -> static_load.Judged:
    figures = {"ours": ours, "plain": [1.0] * len(ours), best: [1.0] * len(ours), "adaptive verification": adaptive}
    return static_load.Judged(static_load.Point(Case("llama-3.1-8b-h200", 0.5), 8), figures, best)


def test_a_point_below_the_best_static_setting_is_missed_even_where_the_mean_holds():
    found = static_load.bars([judged([0.9, 0.9], [0.5, 0.5]), judged([1.5, 1.5], [0.5, 0.5])])
    verdicts = {(bar.name, bar.holds) for bar in found}
    assert ("1 static load", False) in verdicts
    assert ("1 static load, geometric mean", True) in verdicts


def test_where_no_draft_pays_adaptive_verification_is_to_be_beaten_by_a_twentieth():
    found = static_load.bars([judged([1.03, 1.03], [1.0, 1.0], best="plain")])
    verdict = next(bar for bar in found if bar.name == "6 adaptive verification")
    assert not verdict.holds
    assert verdict.least == pytest.approx(1.05)


def test_a_wrong_profile_is_wrong_by_what_the_bar_says():
    """Drafts that cost 1.5 times what the profile says, and a knee that comes 30% later."""
    from outrider_runtime.core.cost import DrafterCost, LatencyModel, StepCost
    from outrider_runtime.core.plans import ExecutionMode

    step = StepCost(per_batched_token_s=1e-5, per_batched_token_above_knee_s=1e-5, knee_tokens=100.0, constant_s=6e-3)
    model = LatencyModel({ExecutionMode.UNIFORM: step}, {"eagle": DrafterCost(step)})
    assert static_load.knee_off(model).target[ExecutionMode.UNIFORM].knee_tokens == pytest.approx(130.0)
    dearer = static_load.draft_dearer(model).drafters["eagle"].cost
    assert dearer.constant_s == pytest.approx(4e-3)
    assert dearer.knee_tokens == 100.0


def test_a_request_that_misses_its_ttft_is_a_miss_whatever_its_tpot():
    targets = slo_mix.classes(step_s=0.01)

    nothing = np.zeros(3)
    result = Result(
        goodput=1.0, latency_s=1.0, draft_length=0.0, steps=1, ttft_s=np.array([0.1, 99.0, 0.1]),
        tpot_s=np.full(3, 0.001), slo_class=np.array([0, 0, 1]), done_s=nothing, arrived_s=nothing,
        tokens=np.ones(3, np.int64),
    )  # fmt: skip
    assert slo_mix.attained(result, targets) == pytest.approx(2 / 3)


def test_a_shift_keeps_its_prompts_in_their_phase():
    """Each phase's requests come in it, and ask what its group asks."""
    from tests.benchmarks.replay.settings import recording

    case = Case("llama-3.1-8b-h200", None)
    shift = phases.Shift("s", case, (phases.Phase(5.0, 8.0, "chat"), phases.Phase(5.0, 8.0, "reading")))
    load = phases.load(shift, seed=3)
    real = recording(None)
    groups = real.group[load.answer]
    early = load.at_s < 5.0
    assert (groups[early] == real.groups.index("chat")).all()
    assert (groups[~early] == real.groups.index("reading")).all()
    assert len(phases.load(shift, 3)) == len(load)
