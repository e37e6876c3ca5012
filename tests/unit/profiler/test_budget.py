"""The time budget: kept, used well, and refused when it is too small."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.profiler import session
from outrider_runtime.profiler.documents import fit_target
from outrider_runtime.profiler.failures import ProfilingError
from outrider_runtime.profiler.grid import (
    EngineLimits,
    GridPoint,
    StepPace,
    held_out,
    most_informative,
    select_affordable,
    target_grid,
)

from tests.unit.profiler.machine import LIMITS, PACE, TARGET, Machine


def spent(machine: Machine, budget_s: float) -> tuple[float, session.ShapeSeries]:
    series = session.target_series(LIMITS, PACE, "lookup", budget_s)
    session.run([series], machine.visit, session.Budget(budget_s, 0.0, machine.clock), lambda _text: None)
    return machine.time_s, series


@pytest.mark.parametrize("budget_s", [15.0, 40.0, 300.0])
def test_measuring_ends_within_the_budget_and_one_shape(budget_s):
    """`profiling.timeBudget` is a promise to other users of the accelerator."""
    took, _ = spent(Machine(noise=0.5), budget_s)
    assert took <= budget_s + 2.0


def test_smaller_budget_measures_fewer_shapes():
    """The design says so: the most informative ones stay."""
    few, many = spent(Machine(), 8.0)[1], spent(Machine(), 120.0)[1]
    assert len(few.order) < len(many.order)


def test_profile_with_short_budget_has_held_out_shapes():
    """An error on fitted shapes alone would flatter exactly the profile that knows least."""
    slower_than_it_seemed = Machine(target=lambda shape: 10 * TARGET.seconds(shape))
    _, series = spent(slower_than_it_seemed, 12.0)
    assert series.enough
    assert len(series.order) < 12
    fitted = fit_target(series)
    assert any(fit.errors for fit in fitted.values())


def test_quiet_machine_ends_before_the_budget_is_spent():
    """Rounds that only repeat what is known are left out: the demo and a patched-in draft are quick."""
    took, _ = spent(Machine(), 300.0)
    assert took < 60


def test_budget_too_small_for_a_fit_is_refused():
    """A fit of three shapes would be a guess with coefficients."""
    with pytest.raises(ProfilingError, match=r"raise profiling\.timeBudget") as caught:
        fit_target(spent(Machine(), 0.2)[1])
    assert caught.value.reason == "TimeBudgetTooSmall"


def test_rounds_visit_each_shape_again():
    """A neighbour's slow half minute must not fall on the visits of one shape alone."""
    machine = Machine(noise=0.3)
    spent(machine, 120.0)
    first = machine.orders[0].point
    visits = [index for index, order in enumerate(machine.orders) if order.point == first]
    assert len(visits) >= 2
    assert min(later - earlier for earlier, later in pairwise(visits)) > 10


def test_first_shapes_span_the_model():
    """Most informative first: the first seven hold short and long, small and large."""
    order = most_informative([p for p in target_grid(LIMITS) if not p.is_varlen], PACE)[:7]
    assert len({p.context for p in order}) >= 2
    assert {1, 32} & {p.batch for p in order}
    assert max(p.batched for p in order) >= 32
    assert min(p.batched for p in order) == 1


def test_set_up_of_a_batch_takes_the_time_of_prompts():
    """Bug: on a GPU a decoding step's tokens are nearly free, a prompt's are not; priced as the former, long contexts
    in large batches spent the budget before their first step was measured."""
    short, long = GridPoint(64, 32), GridPoint(1024, 32)
    cheap = StepPace(step_s=0.005, token_s=1e-6, prompt_token_s=1e-6)
    assert select_affordable([short, long], cheap, 10.0) == [short, long]
    assert select_affordable([short, long], replace(cheap, prompt_token_s=30e-6), 10.0) == [short]


def test_step_with_a_prompt_takes_the_time_of_prompts():
    pace = StepPace(step_s=1.0, token_s=0.25, prompt_token_s=2.0)
    assert pace.seconds(GridPoint(64, 2, 1, prefill=3)) == 1.0 + 4 * 0.25 + 3 * 2.0
    assert pace.times(2).seconds(GridPoint(64, 1)) == 2.5


def test_longest_context_is_measured_if_it_fits_memory():
    """Bug: the longest measured context was a fourth of what requests may take, and what lies beyond was a guess."""
    limits = EngineLimits(
        max_requests=64, max_model_len=102_400, max_draft_tokens=4, step_tokens=8192, kv_tokens=500_000
    )
    longest = max(p.context for p in target_grid(limits))
    assert 100_000 < longest < 102_400
    assert {p.batch for p in target_grid(limits) if p.context == longest} == {1, 2, 4}
    assert longest in {p.context for p in most_informative(target_grid(limits), PACE)[:20]}
    assert max(p.context for p in target_grid(replace(limits, max_model_len=40_000))) == 32_768


def test_every_shape_is_within_the_engines_limits():
    """A shape that cannot be scheduled would hang the profile."""
    tight = EngineLimits(max_requests=4, max_model_len=300, max_draft_tokens=3, step_tokens=40, kv_tokens=2000)
    grid = target_grid(tight)
    assert grid
    assert all(p.batch <= 4 and p.batched <= 40 and p.context < 300 for p in grid)
    assert all(p.batch * p.context <= 2000 for p in grid)
    assert all(p.batch < 4 for p in grid if p.prefill), "a full batch has no place for a prompt"


def test_engine_without_speculation_measures_plain_decoding():
    """No speculative config: nothing could verify a proposal."""
    plain = EngineLimits(max_requests=8, max_model_len=2048, max_draft_tokens=0, step_tokens=2048, kv_tokens=40_000)
    assert {p.verify for p in target_grid(plain)} == {0}


def test_held_out_shapes_do_not_span_the_design():
    """The fit must not extrapolate to every held-out shape, as it would if the grid's corners were held out."""
    points = [GridPoint(64, batch, verify) for batch in (1, 2, 4, 8, 16) for verify in (0, 1, 4)]
    order = most_informative(points, StepPace(0.01, 0.001, 0.001))
    assert not held_out(order) & set(order[:6])
    assert 2 <= len(held_out(order)) <= 4


@given(
    limits=st.builds(
        EngineLimits,
        max_requests=st.integers(1, 600),
        max_model_len=st.integers(16, 200_000),
        max_draft_tokens=st.integers(0, 16),
        step_tokens=st.integers(32, 16_384),
        kv_tokens=st.integers(200, 2_000_000),
    ),
    pace=st.builds(
        StepPace, step_s=st.floats(1e-4, 2), token_s=st.floats(1e-7, 0.1), prompt_token_s=st.floats(1e-7, 0.1)
    ),
    budget_s=st.floats(1, 3600),
)
@settings(max_examples=60, deadline=None)
def test_any_engine_has_a_grid_that_it_can_run(limits, pace, budget_s):
    """Engines range from a busy laptop to a GPU with a long context: each has shapes to measure, and none hangs."""
    grid = select_affordable(target_grid(limits), pace, budget_s)
    assert grid
    assert sorted(most_informative(grid, pace)) == sorted(grid)
    for point in grid:
        assert point.batch + (point.prefill > 0) <= limits.max_requests
        assert point.batched <= limits.step_tokens
        assert point.context < limits.max_model_len
        assert point.verify <= limits.max_draft_tokens


def test_target_without_repeated_shapes_makes_no_profile():
    """Noise is known only from repeated visits; a spread of 0% would be wrong."""
    _, series = spent(Machine(target=lambda shape: 10 * TARGET.seconds(shape)), 2.2)
    assert series.enough
    with pytest.raises(ProfilingError, match="measured twice") as caught:
        fit_target(series)
    assert caught.value.reason == "TimeBudgetTooSmall"


def test_busy_machine_gets_overtime():
    """Bug: with `profiling.mode: Required` a profile that was refused for its budget left the service down for ever."""
    took, series = spent(Machine(target=lambda shape: 10 * TARGET.seconds(shape)), 4.0)
    assert took > 4.0
    assert fit_target(series)
    assert len(series.visits) == series.needed + 1, "no more than a profile needs"


def test_noisy_machine_is_measured_until_it_repeats():
    """Its neighbours may leave: a spread over 100% would be refused, and there is no second measurement."""
    machine = Machine()
    machine.target = lambda shape: (
        TARGET.seconds(shape) * (3.0 ** (len(machine.orders) % 4) if machine.time_s < 10 else 1)
    )
    took, series = spent(machine, 8.0)
    assert 8.0 < took < 3 * 8.0 + 2.0
    assert series.makes_a_profile
