"""Turns measurements into the profile documents that the profiling Job reports."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from outrider_crds import profile as api
from outrider_crds.profile import DrafterProfile, ProfilingResult, TargetProfile
from outrider_crds.profile_keys import ProfileKeys

from outrider_runtime.control import settings
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.step_times import Shape, StepCost
from outrider_runtime.profiler import failures
from outrider_runtime.profiler.cost_fit import Form
from outrider_runtime.profiler.failures import ProfilingError
from outrider_runtime.profiler.fitting import FittedCost, fit_cost, fit_modes
from outrider_runtime.profiler.grid import EngineLimits, GridPoint
from outrider_runtime.profiler.session import NOISY_SPREAD, ShapeSeries
from outrider_runtime.profiler.step_samples import Measurement, drafter_measurements, median_spread, target_measurements

CLOCK_S = 5e-4
"""Times up to this vary with the clock's precision; their spread says nothing about the machine."""
LEAST_PASS_SHARE = 0.1
"""A block drafter's pass is at least this share of a step that feeds it, too; noise may say less."""
DIGITS = 4
"""Significant digits of a coefficient: a measurement is no more precise, and the result must fit into 4096 bytes."""


def fit_target(series: ShapeSeries) -> dict[ExecutionMode, FittedCost]:
    """Fit the target's cost for each execution mode. Raises ProfilingError if too little was measured."""
    _check_enough(series)
    if not series.repeated:
        text = "no shape could be measured twice within the time budget; raise profiling.timeBudget"
        raise ProfilingError(failures.TIME_BUDGET_TOO_SMALL, text)
    measurements = target_measurements(series.visits)
    fitted = fit_modes(measurements, series.held_out)
    return fitted or {ExecutionMode.VARLEN: fit_cost(measurements, series.held_out)}


def fit_drafter(series: ShapeSeries, drafter: settings.Drafter) -> FittedCost:
    """Fit a drafter's cost. Raises ProfilingError if too little was measured or the drafter did not run."""
    measurements = drafter_measurements(series.visits, drafter.name)
    if series.suspended:
        raise ProfilingError(failures.DRAFTER_FAILED, series.suspended)
    _check_enough(series)
    if not measurements:
        raise ProfilingError(failures.DRAFTER_FAILED, "the drafter did not run in any of the measured steps")
    if drafter.kv_budget is not None:
        measurements = [_with_window_shape(m, drafter) for m in measurements]
    if drafter.passes:
        return fit_cost(measurements, series.held_out, passes=True)
    if drafter.is_block:
        return _fit_block(measurements, series.held_out)
    return fit_cost([_lookup(m) for m in measurements], series.held_out, form=Form.PER_REQUEST)


def _fit_block(measurements: Sequence[Measurement], held_out: Collection[GridPoint]) -> FittedCost:
    """Fit what feeding costs to the steps that only feed, and a pass to what the others take beyond that.

    Without a step that only feeds, feeding is part of the pass.
    """
    fed = [_feeding(m) for m in measurements if not m.draft_tokens]
    proposing = [m for m in measurements if m.draft_tokens]
    if not proposing:
        raise ProfilingError(failures.DRAFTER_FAILED, "the drafter proposed in none of the measured steps")
    feeding = fit_cost(fed, (), form=Form.BASE).cost if fed else StepCost()
    passes = [_lookup(_subtract_feeding(m, feeding.seconds(_feeding(m).shape))) for m in proposing]
    return dataclasses.replace(fit_cost(passes, held_out, form=Form.PER_REQUEST), first_pass=feeding)


def _feeding(measurement: Measurement) -> Measurement:
    """Return the measurement as feeding sees it: its time depends on the step's tokens alone."""
    return dataclasses.replace(measurement, shape=Shape(0.0, measurement.shape.n_batched, 0.0))


def _subtract_feeding(measurement: Measurement, feeding_s: float) -> Measurement:
    """Return the measurement without the seconds of feeding."""
    least_s = LEAST_PASS_SHARE * measurement.seconds
    return dataclasses.replace(measurement, seconds=max(measurement.seconds - feeding_s, least_s))


def target_profile(
    fitted: Mapping[ExecutionMode, FittedCost],
    series: ShapeSeries,
    limits: EngineLimits,
    *,
    keys: ProfileKeys,
    model: str,
    device: str,
    engine_version: str,
    commit: str,
    measured_at: str,
) -> TargetProfile:
    return TargetProfile(
        key=keys.target,
        model=model,
        product=keys.product,
        device=device,
        engine_version=engine_version,
        commit=commit,
        costs={api.ProfileExecutionMode(mode.value): step_cost(fit.cost) for mode, fit in fitted.items()},
        error_percent=held_out_percent(fitted.values()),
        spread_percent=_percent(median_spread(target_measurements(series.visits))),
        most_requests=_most_requests(fitted.values()),
        request_tokens=limits.max_model_len,
        kv_tokens=limits.kv_tokens,
        measured_at=measured_at,
    )


def drafter_profile(
    fitted: FittedCost, drafter: settings.Drafter, *, key: str, commit: str, measured_at: str
) -> DrafterProfile:  # fmt: skip
    return DrafterProfile(
        key=key,
        name=drafter.name,
        cost=step_cost(fitted.cost),
        first_pass=step_cost(fitted.first_pass),
        autoregressive=drafter.passes,
        widest=max(judged.measurement.draft_width for judged in fitted.judged),
        error_percent=held_out_percent([fitted]),
        most_requests=_most_requests([fitted]),
        budget_tokens=drafter.kv_budget,
        commit=commit,
        measured_at=measured_at,
    )


def held_out_percent(fitted: Iterable[FittedCost]) -> float:
    """Return the median relative error of the held-out shapes, in percent; of all shapes if none was held out."""
    fitted = list(fitted)
    errors = [error for fit in fitted for error in fit.errors]
    return _percent(statistics.median(errors or [judged.error for fit in fitted for judged in fit.judged]))


def _most_requests(fitted: Iterable[FittedCost]) -> int:
    return max(judged.measurement.point.batch for fit in fitted for judged in fit.judged)


def step_cost(cost: StepCost) -> api.ProfileStepCost:
    """Return the cost as the API has it, rounded to `DIGITS` significant digits."""
    return api.ProfileStepCost(
        **{name: float(f"{value:.{DIGITS}g}") for name, value in dataclasses.asdict(cost).items()}
    )


def termination_message(result: ProfilingResult) -> str:
    """Return the result in at most 4096 bytes. Messages of failures are shortened if necessary, measurements never."""
    limit = failures.MESSAGE_LIMIT
    while True:
        text = _json(result)
        if len(text.encode()) <= api.TERMINATION_MESSAGE_LIMIT or limit < 20:
            return text
        limit //= 2
        shorter = [f.model_copy(update={"message": f.message[:limit]}) for f in result.failures]
        result = result.model_copy(update={"failures": shorter})


def _json(result: ProfilingResult) -> str:
    return result.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)


def _lookup(measurement: Measurement) -> Measurement:
    """Return the measurement as prompt lookup sees it: its time depends on context and requests, not on the step."""
    shape = measurement.shape
    return dataclasses.replace(measurement, shape=Shape(shape.n_context, 0.0, shape.n_requests))


def _with_window_shape(measurement: Measurement, drafter: settings.Drafter) -> Measurement:
    """Return the measurement with the shape that a drafter with a context window processed.

    Each pass reads at most `kv_budget` context tokens of a request. A draft model's first pass runs over the step's
    tokens; the target that drafts for itself runs over one token per request.
    """
    assert drafter.kv_budget is not None
    shape = measurement.shape
    requests = shape.n_requests
    window = min(shape.n_context / requests, float(drafter.kv_budget))
    tokens = requests if drafter.is_target else shape.n_batched
    return dataclasses.replace(measurement, shape=Shape(requests * window, tokens, requests, tokens * window / 1000))


def check_quiet(fitted: Iterable[FittedCost]) -> None:
    """Raise ProfilingError if the machine was too noisy for a usable profile. Times below `CLOCK_S` do not count."""
    measurements = [judged.measurement for fit in fitted for judged in fit.judged]
    spread = median_spread([m for m in measurements if m.seconds > CLOCK_S])
    if spread > NOISY_SPREAD:
        raise ProfilingError(
            failures.NOISY,
            f"the same shape took {spread:.0%} longer from one run to the next; keep other work off the machine "
            "or raise profiling.timeBudget, then annotate the service with outrider.dev/reprofile",
        )


def _check_enough(series: ShapeSeries) -> None:
    if not series.enough:
        count = len({visit.point for visit in series.visits})
        raise ProfilingError(
            failures.TIME_BUDGET_TOO_SMALL,
            f"the time budget was spent after {count} shapes, at least {max(1, series.needed)} are needed; raise "
            "profiling.timeBudget",
        )


def _percent(share: float) -> float:
    return round(100 * share, 2)
