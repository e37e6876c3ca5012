"""What the profiler says about a machine whose cost is known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter
from outrider_runtime.control.step_times import DrafterCost, Shape, StepCost
from outrider_runtime.profiler import session
from outrider_runtime.profiler.documents import check_quiet, drafter_profile, fit_drafter, fit_target, held_out_percent
from outrider_runtime.profiler.failures import ProfilingError
from outrider_runtime.profiler.fitting import fit_modes
from outrider_runtime.profiler.grid import GridPoint
from outrider_runtime.profiler.step_samples import Measurement

from tests.unit.profiler.machine import BLOCK, EAGLE, LIMITS, LOOKUP, PACE, TARGET, Machine, shape_of

BUDGET_S = 90.0


def measured(machine: Machine, *, budget_s: float = BUDGET_S) -> session.ShapeSeries:
    series = session.target_series(LIMITS, PACE, "lookup", budget_s)
    budget = session.Budget(budget_s, machine.time_s, machine.clock)
    session.run([series], machine.visit, budget, lambda _text: None)
    return series


def measured_drafter(machine: Machine, drafter: Drafter) -> session.ShapeSeries:
    series = session.drafter_series(LIMITS, PACE, drafter, BUDGET_S)
    session.run([series], machine.visit, session.Budget(BUDGET_S, machine.time_s, machine.clock), lambda _text: None)
    return series


LOOKUP_DRAFTER = Drafter("lookup")
BLOCK_DRAFTER = Drafter("block", needs_kv=True, needs_hidden=True)
HEAD = Drafter("eagle", passes=True, needs_hidden=True)
SELF = Drafter("self", passes=True, kv_budget=256)
SMALL = Drafter("small", passes=True, needs_kv=True, kv_budget=256)


def test_quiet_machine_is_predicted_within_a_percent():
    """The fit finds constant, slopes and knee, so that it also holds between and beyond the measured shapes."""
    fitted = fit_target(measured(Machine()))[ExecutionMode.UNIFORM]
    for shape in (Shape(100, 3, 3, 0.1), Shape(5000, 20, 10, 10), Shape(9000, 200, 40, 45)):
        assert fitted.cost.seconds(shape) == pytest.approx(TARGET.seconds(shape), rel=0.01)
    assert held_out_percent([fitted]) < 0.5


def test_noisy_machine_is_predicted_within_ten_percent():
    """Lowest of several medians: one step in ten that takes three times as long must not show."""
    machine = Machine(noise=0.15, spikes=0.1)
    fitted = fit_target(measured(machine))
    assert held_out_percent(fitted.values()) <= 10
    for visit in machine.orders:
        shape = shape_of(visit.point)
        mode = ExecutionMode.VARLEN if visit.point.is_varlen else ExecutionMode.UNIFORM
        assert fitted[mode].cost.seconds(shape) == pytest.approx(TARGET.seconds(shape), rel=0.2)


def test_machine_of_another_form_has_a_large_error():
    """The error is honest: held-out shapes are judged by a fit that never saw them."""

    def erratic(shape: Shape) -> float:
        return 0.01 * (1 + 5 * (0.618 * shape.n_batched % 1)) + 1e-6 * shape.n_context

    assert held_out_percent(fit_target(measured(Machine(target=erratic))).values()) > 15


def test_held_out_shapes_do_not_affect_the_fit():
    """A held-out shape that was measured ten times too long shows up with its whole error."""
    series = measured(Machine())
    victim = next(iter(sorted(p for p in series.held_out if not p.is_varlen)))
    lying = Machine(target=lambda shape: TARGET.seconds(shape) * (10 if shape == shape_of(victim) else 1))
    fitted = fit_target(measured(lying))[ExecutionMode.UNIFORM]
    judged = next(j for j in fitted.judged if j.measurement.point == victim)
    assert judged.held_out
    assert judged.error == pytest.approx(0.9, abs=0.02)


def test_shapes_around_the_crossover_are_held_out():
    """An error costs most where speculation stops paying; the held-out error includes shapes from there."""
    series = measured(Machine())
    length = 2
    pays = [
        batch
        for batch in range(1, 33)
        if 2.19 * TARGET.seconds(Shape(batch * 64, batch, batch))
        > TARGET.seconds(Shape(batch * 64, batch * (length + 1), batch))
    ]
    held_out = {p.batch for p in series.held_out if p.verify == length and p.context == 64}
    assert any(batch <= max(pays) for batch in held_out)
    assert any(batch > max(pays) for batch in held_out)


def test_autoregressive_drafter_costs_time_per_pass():
    """T_draft(K) = T_d(context, batched) + (K-1) T_d(context, n): one coefficient set predicts every K."""
    fitted = fit_drafter(measured_drafter(Machine(noise=0.05), HEAD), HEAD)
    assert fitted.cost.constant_s == pytest.approx(EAGLE.cost.constant_s, rel=0.1)
    assert fitted.cost.per_batched_token_s == pytest.approx(EAGLE.cost.per_batched_token_s, rel=0.25)
    assert held_out_percent([fitted]) < 10


def test_beam_costs_time_per_width():
    """Its later passes run over width times as many tokens: one coefficient set predicts widths that were not measured,
    and the profile says how wide it measured."""
    wide = dataclasses.replace(HEAD, widest=8)
    series = measured_drafter(Machine(noise=0.05), wide)
    assert {visit.point.width for visit in series.visits} >= {1, 8}
    fitted = fit_drafter(series, wide)
    for width in (2, 5):
        later = Shape(16 * 64, 16 * width, 16, 16 * width * 64 / 1000)
        assert fitted.cost.seconds(later) == pytest.approx(EAGLE.cost.seconds(later), rel=0.05)
    assert drafter_profile(fitted, wide, key="k", commit="", measured_at="2026-11-24T12:00:00Z").widest == 8


def test_first_pass_with_its_own_cost_is_fitted():
    """An EAGLE-3 head condenses the target's hidden states once a step: one set of coefficients was off by a fifth."""
    cost = StepCost(1e-9, 1.1e-5, 2.5e-5, 16, 1.4e-4, 0.0, 1e-3)  # as measured with SmolLM2's head on two cores
    head = DrafterCost(cost, first_pass=StepCost(constant_s=1.4e-3))
    fitted = fit_drafter(measured_drafter(Machine(drafters={"eagle": head}, noise=0.1), HEAD), HEAD)
    assert fitted.first_pass.constant_s == pytest.approx(1.4e-3, rel=0.15)
    assert fitted.cost.constant_s == pytest.approx(1e-3, rel=0.25)
    assert held_out_percent([fitted]) < 5
    plain = fit_drafter(measured_drafter(Machine(noise=0.05), HEAD), HEAD)
    assert plain.first_pass == StepCost(), "no term that nothing asks for"


def test_prompt_lookup_costs_a_constant_and_per_request():
    """Its cost must not depend on the tokens of the target's pass, which it never sees."""
    fitted = fit_drafter(measured_drafter(Machine(), LOOKUP_DRAFTER), LOOKUP_DRAFTER)
    assert fitted.cost.per_batched_token_s == 0
    assert fitted.cost.seconds(Shape(0, 0, 16)) == pytest.approx(LOOKUP.cost.seconds(Shape(0, 0, 16)), rel=0.05)


def test_block_drafter_has_a_price_of_feeding_and_of_its_pass() -> None:
    """Bug: no step was measured that only fed it, so that feeding was free and a pass cost what both take."""
    series = measured_drafter(Machine(noise=0.05), BLOCK_DRAFTER)
    assert {visit.point.verify > 0 for visit in series.visits} == {False, True}
    fitted = fit_drafter(series, BLOCK_DRAFTER)
    for tokens in (1, 32, 256):
        shape = Shape(0, tokens, 1)
        assert fitted.first_pass.seconds(shape) == pytest.approx(BLOCK.first_pass.seconds(shape), rel=0.1)
    assert fitted.cost.seconds(Shape(0, 0, 16)) == pytest.approx(BLOCK.cost.seconds(Shape(0, 0, 16)), rel=0.1)
    assert held_out_percent([fitted]) < 5


def test_machine_that_never_repeats_is_noisy():
    """Coefficients of such a run would mislead every later choice: none are given, in overtime neither."""
    with pytest.raises(ProfilingError, match="longer from one run to the next") as caught:
        check_quiet(fit_target(measured(Machine(slows=2.5))).values())
    assert caught.value.reason == "Noisy"


def test_suspended_drafter_fails_with_the_reason():
    """A head that raises in its forward must not look like a cheap one."""
    machine = Machine(suspended={"eagle": "suspended for 30 s: size mismatch"})
    with pytest.raises(ProfilingError, match="size mismatch") as caught:
        fit_drafter(measured_drafter(machine, HEAD), HEAD)
    assert caught.value.reason == "DrafterFailed"


def steps(
    cost: StepCost, mode: ExecutionMode, tokens: list[tuple[int, int]], noise: np.random.Generator
) -> list[Measurement]:
    """Measurements of decoding requests with 64 tokens of context each; (requests, verified tokens)."""
    result = []
    for batch, verified in tokens:
        shape = Shape(64 * batch, batch + verified, batch, 0.064 * (batch + verified))
        seconds = cost.seconds(shape) * noise.uniform(0.93, 1.07)
        point = GridPoint(64, batch, verified, uneven=mode is ExecutionMode.VARLEN)
        result.append(Measurement(point, shape, mode, seconds, math.nan))
    return result


EVEN = [(n, n * k) for n in (1, 2, 4, 8, 16, 32, 64) for k in (0, 1, 3)]
UNEVEN = [(n, 5 * n // 2) for n in (2, 4, 8, 16, 32)]


@pytest.mark.parametrize("seed", range(5))
def test_constant_of_varlen_steps_is_fitted_from_few_shapes(seed: int):
    """Promise: if the modes differ by a constant, the shapes of both give the slopes. A fit of the five uneven shapes
    by themselves says of a large batch with one proposal what noise and a straight line through others make of it."""
    noise = np.random.default_rng(seed)
    even = StepCost(1e-6, 4e-4, 5e-4, 16.0, constant_s=0.03)
    uneven = dataclasses.replace(even, constant_s=0.032)
    fitted = fit_modes(
        [*steps(even, ExecutionMode.UNIFORM, EVEN, noise), *steps(uneven, ExecutionMode.VARLEN, UNEVEN, noise)], ()
    )
    shape = Shape(64 * 48, 49, 48, 3.0)
    more_s = fitted[ExecutionMode.VARLEN].cost.seconds(shape) - fitted[ExecutionMode.UNIFORM].cost.seconds(shape)
    assert more_s == pytest.approx(0.002, abs=0.003)


def test_modes_with_different_slopes_are_fitted_apart():
    """CUDA graphs make such a difference: uniform steps have them, varlen steps of the same size do not."""
    noise = np.random.default_rng(0)
    even, uneven = (
        StepCost(per_batched_token_s=1e-4, constant_s=0.01),
        StepCost(per_batched_token_s=5e-4, constant_s=0.01),
    )
    fitted = fit_modes(
        [*steps(even, ExecutionMode.UNIFORM, EVEN, noise), *steps(uneven, ExecutionMode.VARLEN, UNEVEN, noise)], ()
    )
    for mode, cost in ((ExecutionMode.UNIFORM, even), (ExecutionMode.VARLEN, uneven)):
        shape = Shape(640, 40, 10, 2.6)
        assert fitted[mode].cost.seconds(shape) == pytest.approx(cost.seconds(shape), rel=0.1)


STRAIGHT = dataclasses.replace(TARGET, per_batched_token_above_knee_s=0.0)


class OverAWindow(DrafterCost):
    """Reads so much of each request, and nothing of the target's step."""

    def seconds(self, first: Shape, draft_tokens: int, width: int = 1) -> float:  # noqa: ARG002
        requests = first.n_requests
        read = requests * min(first.n_context / requests, float(SELF.kv_budget or 0))
        return max(1, draft_tokens) * STRAIGHT.seconds(Shape(read, requests, requests))


def test_drafter_with_a_window_costs_time_per_token_read():
    """Bug: fitted to the whole context, its passes seemed cheap for short contexts and expensive for long ones."""
    machine = Machine(drafters={"self": OverAWindow(STRAIGHT)})
    fitted = fit_drafter(measured_drafter(machine, SELF), SELF)
    for read, requests in ((64, 4), (256, 4), (256, 16)):
        shape = Shape(read * requests, requests, requests, read * requests / 1000)
        assert fitted.cost.seconds(shape) == pytest.approx(STRAIGHT.seconds(shape), rel=0.03)
    assert held_out_percent([fitted]) < 2


class Bounded(StepCost):
    """Reads no more than 256 tokens of each request."""

    def seconds(self, shape: Shape) -> float:
        cost, read = StepCost(self.per_context_token_s, self.per_batched_token_s, constant_s=self.constant_s), 256.0
        return cost.seconds(shape._replace(n_context=min(float(shape.n_context), read * shape.n_requests)))


def test_draft_model_with_a_window_costs_time_per_batched_token():
    """Unlike the target itself, its first pass runs over the target's step."""
    cost = Bounded(2e-6, 5e-5, constant_s=0.002)
    fitted = fit_drafter(measured_drafter(Machine(drafters={"small": DrafterCost(cost)}), SMALL), SMALL)
    for read, requests, tokens in ((64, 4, 4), (256, 4, 20), (256, 16, 16)):
        shape = Shape(read * requests, tokens, requests, read * tokens / 1000)
        assert fitted.cost.seconds(shape) == pytest.approx(cost.seconds(shape), rel=0.03)
    assert held_out_percent([fitted]) < 2
