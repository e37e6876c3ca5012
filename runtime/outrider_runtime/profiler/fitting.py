"""Fits coefficients of the latency model to measurements, and reports the error on shapes that the fit did not see."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.step_times import Shape, StepCost
from outrider_runtime.profiler.cost_fit import LARGER_FORM_GAIN, Fit, Form, Sample, fit
from outrider_runtime.profiler.grid import GridPoint
from outrider_runtime.profiler.step_samples import Measurement

MIN_MEASUREMENTS = 5
"""Measurements that an execution mode needs for coefficients of its own."""
MIN_SHAPES_FOR_LARGER_FORM = 8
"""Shapes that a form with more coefficients needs; with fewer it would fit the noise."""
FOLDS = 3
"""Folds of the cross-validation."""
SHARING_MODES = (ExecutionMode.UNIFORM, ExecutionMode.VARLEN)
"""Execution modes whose costs may differ by a constant only: uniform and varlen steps."""


@dataclass(frozen=True, slots=True)
class JudgedShape:
    """A measured shape, and the time that the fit predicts for it. The fit saw it unless it is held out."""

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
    """Extra cost of a drafter's first pass; zero for the target."""
    form: Form
    judged: tuple[JudgedShape, ...]
    """All shapes, predicted by a fit that did not see the held-out ones."""

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
    """Fit the cost of one execution mode, or of one drafter. passes: the drafter is autoregressive (K passes a step).

    form: terms of the latency model; None: chosen by cross-validation.
    """
    return _fit_samples({m: _sample(m, passes) for m in measurements}, held_out, passes, form).select_mode(measurements)


def fit_modes(measurements: Sequence[Measurement], held_out: Collection[GridPoint]) -> dict[ExecutionMode, FittedCost]:
    """Fit one set of coefficients for each execution mode that was measured often enough.

    Uniform and varlen steps share all coefficients but the constant if that predicts unseen shapes better. It does if
    no graph is captured, so that a token costs the same in both modes: the shared fit has twice the shapes.
    """
    by_mode = {mode: [m for m in measurements if m.mode == mode] for mode in ExecutionMode}
    apart = {
        mode: _fit_samples({m: _sample(m) for m in of_mode}, held_out)
        for mode, of_mode in by_mode.items()
        if len(of_mode) >= MIN_MEASUREMENTS
    }
    fitted = {mode: fit.select_mode(by_mode[mode]) for mode, fit in apart.items()}
    if not apart.keys() >= set(SHARING_MODES):
        return fitted
    both = [m for mode in SHARING_MODES for m in by_mode[mode]]
    together = _fit_samples(
        {m: dataclasses.replace(_sample(m), apart=m.mode == ExecutionMode.VARLEN) for m in both}, held_out
    )
    apart_error = fmean(error for mode in SHARING_MODES for error in apart[mode].seen_errors())
    if fmean(together.seen_errors()) >= apart_error:
        return fitted
    return fitted | {mode: together.select_mode(by_mode[mode]) for mode in SHARING_MODES}


@dataclass(frozen=True, slots=True)
class _Fits:
    """Two fits of the same samples: to all of them, and to those that are not held out."""

    samples: Mapping[Measurement, Sample]
    held_out: Collection[GridPoint]
    final: Fit
    """Fit to all samples."""
    blind: Fit
    """Fit to `seen`, which judges the held-out samples."""
    seen: Sequence[Sample]
    """Samples that are not held out."""

    def seen_errors(self) -> list[float]:
        """Return the relative errors of `seen` by cross-validation."""
        return _cross_errors(self.seen, self.final.form, first_pass=False)

    def select_mode(self, measurements: Sequence[Measurement]) -> FittedCost:
        """Return the cost for the measurements of one execution mode."""
        more_s = self.final.apart_s if any(self.samples[m].apart for m in measurements) else 0.0
        cost = dataclasses.replace(self.final.cost, constant_s=self.final.cost.constant_s + more_s)
        judged = tuple(
            JudgedShape(m, self.blind.predicted_s(self.samples[m]), held_out=m.point in self.held_out)
            for m in measurements
        )
        return FittedCost(cost, self.final.first_pass, self.final.form, judged)


def _fit_samples(
    samples: Mapping[Measurement, Sample], held_out: Collection[GridPoint], passes: bool = False,
    form: Form | None = None,
) -> _Fits:  # fmt: skip
    """Fit the samples. A form that is None is chosen without the held-out shapes, so that they can judge it."""
    seen = [sample for m, sample in samples.items() if m.point not in held_out] or list(samples.values())
    form, first_pass = (form, False) if form is not None else _choose_form(seen, passes)
    final = _fit(list(samples.values()), form, first_pass)
    blind = _fit(seen, form, first_pass)
    return _Fits(samples, held_out, final, blind, seen)


def _fit(samples: Sequence[Sample], form: Form, first_pass: bool) -> Fit:
    return fit(samples, forms=[form], first_pass=first_pass)


def _choose_form(samples: Sequence[Sample], passes: bool) -> tuple[Form, bool]:
    """Choose the form by three-fold cross-validation, and whether the first of several passes has its own cost.

    A larger form is chosen only if it lowers the error clearly. Both choices are made together: without the one, the
    other may seem to gain nothing.
    """
    best = (Form.BASE, False)
    if len(samples) < MIN_SHAPES_FOR_LARGER_FORM:
        return best
    lowest = fmean(_cross_errors(samples, *best))
    for first_pass in (False, True) if passes else (False,):
        for form in (Form.BASE, Form.PER_REQUEST, Form.PER_CONTEXT_QUERY, Form.FULL):
            error = fmean(_cross_errors(samples, form, first_pass))
            if error < LARGER_FORM_GAIN * lowest:
                best = (form, first_pass)
                lowest = error
    return best


def _cross_errors(samples: Sequence[Sample], form: Form, first_pass: bool) -> list[float]:
    """Return the relative error of each sample by a fit to the other folds.

    Compare means, not medians: a median ignores the few samples with several passes.
    """
    ranked = sorted(samples, key=lambda sample: sample.later_passes)  # spreads samples with several passes over folds
    errors: list[float] = []
    for start in range(FOLDS):
        fold = ranked[start::FOLDS]
        rest = [sample for sample in ranked if sample not in fold]
        if rest and fold:
            fitted = _fit(rest, form, first_pass)
            errors += [fitted.relative_error(sample) for sample in fold]
    return errors or [0.0]


def _sample(measurement: Measurement, passes: bool = False) -> Sample:
    shape = measurement.shape
    if not passes:
        return Sample(shape, measurement.seconds)
    shape = shape._replace(n_prompt=0.0)  # a drafter computes logits once per request, however many tokens it reads
    if measurement.draft_tokens <= 1:
        return Sample(shape, measurement.seconds)
    width = measurement.draft_width
    later = Shape(shape.n_context, width * shape.n_requests, shape.n_requests, width * shape.n_context / 1000)
    return Sample(shape, measurement.seconds, later=later, later_passes=measurement.draft_tokens - 1)
