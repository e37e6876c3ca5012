"""From a series of measurements to the profile documents that the Job reports."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping

from outrider_crds import profile as api
from outrider_crds.profile import DrafterProfile, ProfileKeys, ProfilingResult, TargetProfile

from outrider_runtime.control import settings
from outrider_runtime.control.cost.fit import Form
from outrider_runtime.control.cost.model import Shape, StepCost
from outrider_runtime.control.data.plans import ExecutionMode
from outrider_runtime.profiler import failures
from outrider_runtime.profiler.failures import ProfilingError
from outrider_runtime.profiler.fitting import FittedCost, fit_cost, fit_modes
from outrider_runtime.profiler.grid import Limits
from outrider_runtime.profiler.samples import Measurement, drafter_measurements, median_spread, target_measurements
from outrider_runtime.profiler.session import NOISY_SPREAD, Series

CLOCK_S = 5e-4
DIGITS = 4


def fit_target(series: Series) -> dict[ExecutionMode, FittedCost]:
    """Raises ProfilingError when too little was measured."""
    _check_enough(series)
    if not series.repeated:
        text = "no shape could be measured twice within the time budget; raise profiling.timeBudget"
        raise ProfilingError(failures.TIME_BUDGET_TOO_SMALL, text)
    measurements = target_measurements(series.visits)
    fitted = fit_modes(measurements, series.held_out)
    return fitted or {ExecutionMode.RAGGED: fit_cost(measurements, series.held_out)}


def fit_drafter(series: Series, drafter: settings.Drafter) -> FittedCost:
    """Raises ProfilingError as `fit_target` does, and when the drafter did not run."""
    measurements = drafter_measurements(series.visits, drafter.name)
    if series.suspended:
        raise ProfilingError(failures.DRAFTER_FAILED, series.suspended)
    _check_enough(series)
    if not measurements:
        raise ProfilingError(failures.DRAFTER_FAILED, "it did not run in any of the measured steps")
    if drafter.kv_budget is not None:
        measurements = [_over_a_window(m, drafter) for m in measurements]
    if drafter.passes:
        return fit_cost(measurements, series.held_out, passes=True)
    return fit_cost([_lookup(m) for m in measurements], series.held_out, form=Form.PER_REQUEST)


def target_profile(
    fitted: Mapping[ExecutionMode, FittedCost],
    series: Series,
    limits: Limits,
    *,
    keys: ProfileKeys,
    model: str,
    device: str,
    engine_version: str,
    commit: str,
    now: str,
) -> TargetProfile:
    return TargetProfile(
        key=keys.target,
        model=model,
        product=keys.product,
        device=device,
        engine_version=engine_version,
        commit=commit,
        costs={api.ExecutionMode(mode.value): step_cost(one.cost) for mode, one in fitted.items()},
        error_percent=held_out_percent(fitted.values()),
        spread_percent=_percent(median_spread(target_measurements(series.visits))),
        most_requests=_most_requests(fitted.values()),
        request_tokens=limits.max_model_len,
        kv_tokens=limits.kv_tokens,
        measured_at=now,
    )


def drafter_profile(
    fitted: FittedCost, drafter: settings.Drafter, *, key: str, commit: str, now: str
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
        measured_at=now,
    )


def held_out_percent(fitted: Iterable[FittedCost]) -> float:
    """Median relative error over all held-out shapes, in percent; over all shapes where none was held out."""
    fitted = list(fitted)
    errors = [error for one in fitted for error in one.errors]
    return _percent(statistics.median(errors or [judged.error for one in fitted for judged in one.judged]))


def _most_requests(fitted: Iterable[FittedCost]) -> int:
    return max(judged.measurement.point.batch for one in fitted for judged in one.judged)


def step_cost(cost: StepCost) -> api.StepCost:
    """As many digits as the measurement carries: the result has to fit into a termination message."""
    return api.StepCost(**{name: float(f"{value:.{DIGITS}g}") for name, value in dataclasses.asdict(cost).items()})


def termination_message(result: ProfilingResult) -> str:
    """The result in at most 4096 bytes: where failures crowd it, their sentences are cut, never a measurement."""
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
    """Prompt lookup scans the requests' tokens; what the target's pass held does not matter to it."""
    shape = measurement.shape
    return dataclasses.replace(measurement, shape=Shape(shape.n_context, 0.0, shape.n_requests))


def _over_a_window(measurement: Measurement, drafter: settings.Drafter) -> Measurement:
    """What each pass held of a drafter that reads so much of each request; of the target itself nothing but a token a
    request, of a model its step's tokens, too."""
    assert drafter.kv_budget is not None
    shape, requests = measurement.shape, measurement.shape.n_requests
    read = min(shape.n_context / requests, float(drafter.kv_budget))
    tokens = requests if drafter.is_target else shape.n_batched
    return dataclasses.replace(measurement, shape=Shape(requests * read, tokens, requests, tokens * read / 1000))


def check_quiet(fitted: Iterable[FittedCost]) -> None:
    """Raises ProfilingError where the machine was too noisy for its measurements to be believed.

    Times around a tenth of a millisecond (a prompt lookup's) spread with the clock; that is nobody's concern.
    """
    measurements = [judged.measurement for one in fitted for judged in one.judged]
    spread = median_spread([m for m in measurements if m.seconds > CLOCK_S])
    if spread > NOISY_SPREAD:
        raise ProfilingError(
            failures.NOISY,
            f"the same shape took {spread:.0%} longer from one run to the next; leave the machine to the profiling Job "
            "or raise profiling.timeBudget, then annotate the service with outrider.dev/reprofile",
        )


def _check_enough(series: Series) -> None:
    if not series.enough:
        count = len({visit.point for visit in series.visits})
        raise ProfilingError(
            failures.TIME_BUDGET_TOO_SMALL,
            f"the time budget was spent after {count} shapes, {max(1, series.needed)} are the least; raise "
            "profiling.timeBudget",
        )


def _percent(share: float) -> float:
    return round(100 * share, 2)
