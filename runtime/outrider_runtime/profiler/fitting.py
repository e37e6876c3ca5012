"""Samples to coefficients, with the error on shapes that the fit never saw."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outrider_runtime.control.batch import ExecutionMode
from outrider_runtime.control.costs import Shape, StepCost
from outrider_runtime.control.fit import LARGER_FORM_GAIN, Fit, Form, Sample, fit, predicted_s
from outrider_runtime.profiler.grid import GridPoint
from outrider_runtime.profiler.samples import Measurement

LEAST_TO_FIT = 5
"""Measurements of one execution mode below which it gets no coefficients of its own."""
LEAST_FOR_LARGER_FORM = 8
"""Shapes below which a larger form would follow the noise."""
VALIDATE_EVERY = 3


@dataclass(frozen=True, slots=True)
class Judged:
    """One measured shape against the fit that did, or did not, see it."""

    measurement: Measurement
    predicted_s: float
    held_out: bool

    @property
    def error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s - self.measurement.seconds) / self.measurement.seconds


@dataclass(frozen=True, slots=True)
class FittedCost:
    cost: StepCost
    """Fitted to every measurement, the held-out ones included."""
    first_pass: StepCost
    """What a drafter's first pass costs beyond that; nothing for the target."""
    form: Form
    judged: tuple[Judged, ...]
    """By the fit that did not see the held-out shapes."""

    @property
    def errors(self) -> list[float]:
        """Relative errors of the held-out shapes."""
        return [judged.error for judged in self.judged if judged.held_out]


def fit_cost(
    measurements: Sequence[Measurement],
    held_out: Collection[GridPoint],
    *,
    passes: bool = False,
    form: Form | None = None,
) -> FittedCost:
    """Coefficients for one execution mode, or for one drafter (`passes`: autoregressive, K passes a step).

    Where `form` is not given, it is chosen by the seen shapes alone, so that the held-out ones judge it.
    """
    samples = {m.point: _sample(m, passes) for m in measurements}
    seen = [m for m in measurements if m.point not in held_out] or list(measurements)
    of_seen = [samples[m.point] for m in seen]
    form, first_pass = (form, False) if form is not None else _choose_form(of_seen, passes)
    blind = _fit(of_seen, form, first_pass)
    judged = tuple(
        Judged(m, predicted_s(blind.cost, samples[m.point], blind.first_pass), held_out=m.point in held_out)
        for m in measurements
    )
    final = _fit(list(samples.values()), form, first_pass)
    return FittedCost(final.cost, final.first_pass, form, judged)


def fit_modes(measurements: Sequence[Measurement], held_out: Collection[GridPoint]) -> dict[ExecutionMode, FittedCost]:
    """One set of coefficients for each execution mode that was measured often enough."""
    fitted = {}
    for mode in ExecutionMode:
        of_mode = [m for m in measurements if m.mode == mode]
        if len(of_mode) >= LEAST_TO_FIT:
            fitted[mode] = fit_cost(of_mode, held_out)
    return fitted


def _fit(samples: Sequence[Sample], form: Form, first_pass: bool) -> Fit:
    return fit(samples, forms=[form], first_pass=first_pass)


def _choose_form(samples: Sequence[Sample], passes: bool) -> tuple[Form, bool]:
    """The smallest form that holds on shapes it was not fitted to (three-fold), and whether the first of several passes
    has a cost of its own. The two are chosen together: without either term the other one may seem to bring nothing."""
    best = (Form.BASE, False)
    if len(samples) < LEAST_FOR_LARGER_FORM:
        return best
    lowest = _cross_error(samples, *best)
    for first_pass in (False, True) if passes else (False,):
        for form in (Form.BASE, Form.PER_REQUEST, Form.PER_CONTEXT_QUERY, Form.FULL):
            error = _cross_error(samples, form, first_pass)
            if error < LARGER_FORM_GAIN * lowest:
                best, lowest = (form, first_pass), error
    return best


def _cross_error(samples: Sequence[Sample], form: Form, first_pass: bool) -> float:
    """Mean relative error of each sample by a fit that did not see it. A median would not hear the few samples of
    several passes."""
    even = sorted(samples, key=lambda sample: sample.later_passes)  # so that no fold takes all of those
    errors = []
    for start in range(VALIDATE_EVERY):
        fold = even[start::VALIDATE_EVERY]
        rest = [sample for sample in even if sample not in fold]
        if rest and fold:
            fitted = _fit(rest, form, first_pass)
            errors += [abs(predicted_s(fitted.cost, one, fitted.first_pass) / one.seconds - 1.0) for one in fold]
    return sum(errors) / len(errors) if errors else 0.0


def _sample(measurement: Measurement, passes: bool) -> Sample:
    shape = measurement.shape
    if not passes:
        return Sample(shape, measurement.seconds)
    shape = dataclasses.replace(shape, n_prompt=0.0)  # it samples once a request, whatever it reads
    if measurement.draft_tokens <= 1:
        return Sample(shape, measurement.seconds)
    later = Shape(shape.n_context, shape.n_requests, shape.n_requests, shape.n_context / 1000)
    return Sample(shape, measurement.seconds, later=later, later_passes=measurement.draft_tokens - 1)
