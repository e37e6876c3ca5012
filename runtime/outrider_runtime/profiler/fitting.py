"""Samples to coefficients, with the error on shapes that the fit never saw."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from outrider_runtime.control.cost.fit import LARGER_FORM_GAIN, Fit, Form, Sample, fit
from outrider_runtime.control.cost.model import Shape, StepCost
from outrider_runtime.control.data.plans import ExecutionMode
from outrider_runtime.profiler.grid import GridPoint
from outrider_runtime.profiler.samples import Measurement

LEAST_TO_FIT = 5
"""Measurements of one execution mode below which it gets no coefficients of its own."""
LEAST_FOR_LARGER_FORM = 8
"""Shapes below which a larger form would follow the noise."""
VALIDATE_EVERY = 3
SHARING = (ExecutionMode.UNIFORM, ExecutionMode.RAGGED)
"""Modes whose steps may differ by a constant alone."""


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
    """Coefficients for one execution mode, or for one drafter (`passes`: autoregressive, K passes a step)."""
    return _fit_samples({m: _sample(m, passes) for m in measurements}, held_out, passes, form).of(measurements)


def fit_modes(measurements: Sequence[Measurement], held_out: Collection[GridPoint]) -> dict[ExecutionMode, FittedCost]:
    """One set of coefficients for each execution mode that was measured often enough.

    Uniform and ragged steps share all but their constant where that predicts unseen shapes better, as it does where a
    token is a token and no graph is captured: then none of them has to be found from the few shapes of one mode.
    """
    by_mode = {mode: [m for m in measurements if m.mode == mode] for mode in ExecutionMode}
    apart = {
        mode: _fit_samples({m: _sample(m) for m in of_mode}, held_out)
        for mode, of_mode in by_mode.items()
        if len(of_mode) >= LEAST_TO_FIT
    }
    fitted = {mode: fit.of(by_mode[mode]) for mode, fit in apart.items()}
    if not apart.keys() >= set(SHARING):
        return fitted
    both = [m for mode in SHARING for m in by_mode[mode]]
    together = _fit_samples(
        {m: dataclasses.replace(_sample(m), apart=m.mode == ExecutionMode.RAGGED) for m in both}, held_out
    )
    if fmean(together.seen_errors()) >= fmean(error for mode in SHARING for error in apart[mode].seen_errors()):
        return fitted
    return fitted | {mode: together.of(by_mode[mode]) for mode in SHARING}


@dataclass(frozen=True, slots=True)
class _Fits:
    """Of the same samples."""

    samples: Mapping[Measurement, Sample]
    held_out: Collection[GridPoint]
    final: Fit
    """Of every sample."""
    blind: Fit
    """Of `seen`."""
    seen: Sequence[Sample]
    """Those that are not held out."""

    def seen_errors(self) -> list[float]:
        """Relative errors of the latter, each by a fit of one pass that did not see it."""
        return _cross_errors(self.seen, self.final.form, first_pass=False)

    def of(self, measurements: Sequence[Measurement]) -> FittedCost:
        """For `measurements` of one execution mode."""
        more_s = self.final.apart_s if any(self.samples[m].apart for m in measurements) else 0.0
        cost = dataclasses.replace(self.final.cost, constant_s=self.final.cost.constant_s + more_s)
        judged = tuple(
            Judged(m, self.blind.predicted_s(self.samples[m]), held_out=m.point in self.held_out) for m in measurements
        )
        return FittedCost(cost, self.final.first_pass, self.final.form, judged)


def _fit_samples(
    samples: Mapping[Measurement, Sample], held_out: Collection[GridPoint], passes: bool = False,
    form: Form | None = None,
) -> _Fits:  # fmt: skip
    """Where `form` is not given, it is chosen by the seen shapes alone, so that the held-out ones judge it."""
    seen = [sample for m, sample in samples.items() if m.point not in held_out] or list(samples.values())
    form, first_pass = (form, False) if form is not None else _choose_form(seen, passes)
    final, blind = (_fit(some, form, first_pass) for some in (list(samples.values()), seen))
    return _Fits(samples, held_out, final, blind, seen)


def _fit(samples: Sequence[Sample], form: Form, first_pass: bool) -> Fit:
    return fit(samples, forms=[form], first_pass=first_pass)


def _choose_form(samples: Sequence[Sample], passes: bool) -> tuple[Form, bool]:
    """The smallest form that holds on shapes it was not fitted to (three-fold), and whether the first of several passes
    has a cost of its own. The two are chosen together: without either term the other one may seem to bring nothing."""
    best = (Form.BASE, False)
    if len(samples) < LEAST_FOR_LARGER_FORM:
        return best
    lowest = fmean(_cross_errors(samples, *best))
    for first_pass in (False, True) if passes else (False,):
        for form in (Form.BASE, Form.PER_REQUEST, Form.PER_CONTEXT_QUERY, Form.FULL):
            error = fmean(_cross_errors(samples, form, first_pass))
            if error < LARGER_FORM_GAIN * lowest:
                best, lowest = (form, first_pass), error
    return best


def _cross_errors(samples: Sequence[Sample], form: Form, first_pass: bool) -> list[float]:
    """Relative error of each sample by a fit that did not see it. What counts is their mean: a median would not hear
    the few samples of several passes."""
    even = sorted(samples, key=lambda sample: sample.later_passes)  # so that no fold takes all of those
    errors: list[float] = []
    for start in range(VALIDATE_EVERY):
        fold = even[start::VALIDATE_EVERY]
        rest = [sample for sample in even if sample not in fold]
        if rest and fold:
            fitted = _fit(rest, form, first_pass)
            errors += [fitted.relative_error(one) for one in fold]
    return errors or [0.0]


def _sample(measurement: Measurement, passes: bool = False) -> Sample:
    shape = measurement.shape
    if not passes:
        return Sample(shape, measurement.seconds)
    shape = shape._replace(n_prompt=0.0)  # it samples once a request, whatever it reads
    if measurement.draft_tokens <= 1:
        return Sample(shape, measurement.seconds)
    width = measurement.draft_width
    later = Shape(shape.n_context, width * shape.n_requests, shape.n_requests, width * shape.n_context / 1000)
    return Sample(shape, measurement.seconds, later=later, later_passes=measurement.draft_tokens - 1)
