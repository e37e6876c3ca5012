"""Fit a step's cost to measurements: a search for the knee, and the smallest form of the cost that is good enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from outrider_runtime.control.batch import Bools, Floats
from outrider_runtime.control.step_times import FREE, Shape, StepCost

LOGITS = 6
"""Column of the tokens with logits."""
LARGER_FORM_GAIN = 0.85
"""A larger form is kept only if its error / the smaller form's error is below this."""
GOOD_ERROR = 0.02
"""A form with a smaller error than this is kept, and no larger one is tried."""
FOLDS = 4  # of the cross-validation
MAX_KNEES = 24  # each candidate is a fit of its own


class Form(StrEnum):
    """Terms of the cost beyond constant, context and batched tokens (TurboSpec eq. 3 with a knee)."""

    BASE = "base"
    PER_REQUEST = "perRequest"
    PER_CONTEXT_QUERY = "perContextQuery"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Sample:
    shape: Shape
    seconds: float
    weight: float = 1.0
    later: Shape | None = None
    """Shape of each pass of an autoregressive drafter after the first; `seconds` is the sum over all passes."""
    later_passes: int = 0
    apart: bool = False
    """The sample is of a kind whose constant differs by `Fit.apart_s`; both kinds are fitted together."""


@dataclass(frozen=True, slots=True)
class Fit:
    cost: StepCost
    first_pass: StepCost
    """What the first of several passes costs beyond a later one; zero unless `fit(first_pass=True)`."""
    form: Form
    error: float
    """Median relative error on the held-out samples (on the fitted ones if none were held out)."""
    apart_s: float = 0.0
    """Seconds that samples `apart` take beyond `cost`."""

    def predicted_s(self, sample: Sample) -> float:
        """Seconds of the sample as fitted, all of its passes together."""
        seconds = self.cost.seconds(sample.shape) + self.first_pass.seconds(sample.shape)
        if sample.later is not None:
            seconds += sample.later_passes * self.cost.seconds(sample.later)
        return seconds + self.apart_s if sample.apart else seconds

    def relative_error(self, sample: Sample) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s(sample) / sample.seconds - 1.0)


def fit(
    samples: Sequence[Sample],
    held_out: Sequence[Sample] = (),
    forms: Sequence[Form] = tuple(Form),
    *,
    first_pass: bool = False,
) -> Fit:
    """Fit the smallest of `forms` that is good enough. first_pass: the first pass costs a constant and a slope more.

    The form is chosen by cross-validation among `samples`. The `held_out` samples are not fitted: they only give the
    error of the result. Raises ValueError without a sample, or for one whose time is not a positive number.
    """
    _check(samples, held_out)
    form = forms[0] if len(forms) == 1 else _smallest_form(samples, forms, first_pass)
    best = _fit_form(samples, form, first_pass)
    return replace(best, error=_median_error(best, held_out or samples))


def _smallest_form(samples: Sequence[Sample], forms: Sequence[Form], first_pass: bool) -> Form:
    best, error = forms[0], _cross_validate(samples, forms[0], first_pass)
    for form in forms[1:]:
        if error <= GOOD_ERROR:
            break
        larger = _cross_validate(samples, form, first_pass)
        if larger < LARGER_FORM_GAIN * error:
            best, error = form, larger
    return best


def _cross_validate(samples: Sequence[Sample], form: Form, first_pass: bool) -> float:
    """Median relative error over all samples, each predicted by a fit to the other folds."""
    if len(samples) < 2 * FOLDS:
        return _median_error(_fit_form(samples, form, first_pass), samples)
    errors = []
    for fold in range(FOLDS):
        rest = [sample for i, sample in enumerate(samples) if i % FOLDS != fold]
        fitted = _fit_form(rest, form, first_pass)
        errors += [fitted.relative_error(sample) for sample in samples[fold::FOLDS]]
    return float(np.median(errors))


def _median_error(fitted: Fit, samples: Sequence[Sample]) -> float:
    return float(np.median([fitted.relative_error(sample) for sample in samples]))


def _fit_form(samples: Sequence[Sample], form: Form, first_pass: bool) -> Fit:
    sizes = [sample.shape.n_batched for sample in samples]
    solutions = (_solve(samples, form, knee, first_pass) for knee in _knees(sizes))
    return min(solutions, key=lambda solution: solution[1])[0]


def _solve(samples: Sequence[Sample], form: Form, knee: float, first_pass: bool) -> tuple[Fit, float]:
    """Coefficients for one knee, and the weighted squared relative error they leave."""
    design = np.array([_terms(sample, form, knee, first_pass) for sample in samples])  # (samples, 10)
    if not any(sample.shape.n_prompt for sample in samples):
        design[:, LOGITS] = 0.0  # every token has logits: the term is the same as that of batched tokens
    seconds = np.array([sample.seconds for sample in samples])
    weight = np.sqrt([sample.weight for sample in samples]) / seconds
    x, y = design * weight[:, None], seconds * weight
    solution = _non_negative(x.T @ x, x.T @ y)
    context, batched, above, request, query, constant, logits, first_s, first_token_s, apart_s = solution.tolist()
    cost = StepCost(context, batched, above, knee if above > 0 else 0.0, request, query, constant, logits)
    first = StepCost(constant_s=first_s, per_batched_token_s=first_token_s) if first_pass else FREE
    return Fit(cost, first, form, math.nan, apart_s), float(np.square(x @ solution - y).sum())


def _terms(sample: Sample, form: Form, knee: float, first_pass: bool) -> Floats:
    """(10,): seven terms summed over the sample's passes, two for the first pass, one for `apart`. The coefficient of a
    column of zeros is fitted as 0."""
    terms = _features(sample.shape, form, knee)
    if sample.later is not None:
        terms = terms + sample.later_passes * _features(sample.later, form, knee)
    first = (1.0, sample.shape.n_batched) if first_pass else (0.0, 0.0)
    return np.concatenate([terms, [*first, float(sample.apart)]])


def _features(shape: Shape, form: Form, knee: float) -> Floats:
    above = max(0.0, shape.n_batched - knee) if knee > 0 else 0.0
    requests = shape.n_requests if form in (Form.PER_REQUEST, Form.FULL) else 0.0
    query = shape.n_context_query if form in (Form.PER_CONTEXT_QUERY, Form.FULL) else 0.0
    logits = shape.n_batched - shape.n_prompt
    return np.array([shape.n_context, shape.n_batched, above, requests, query, 1.0, logits])


def _check(samples: Sequence[Sample], held_out: Sequence[Sample]) -> None:
    if not samples:
        raise ValueError("fit: no samples; measure at least one shape")
    for sample in (*samples, *held_out):
        if not (np.isfinite(sample.seconds) and sample.seconds > 0):
            raise ValueError(f"fit: {sample.seconds} is no step time (shape {sample.shape}); drop that measurement")


def _knees(sizes: Iterable[float]) -> list[float]:
    """Candidate knees: none (0), and batch sizes with at least one smaller and two larger measured sizes."""
    inner = sorted(set(sizes))[1:-2]
    if len(inner) > MAX_KNEES:
        inner = [inner[round(i)] for i in np.linspace(0, len(inner) - 1, MAX_KNEES)]
    return [0.0, *inner]


def _non_negative(gram: Floats, moment: Floats) -> Floats:
    """Non-negative least squares: argmin over b >= 0 of `b' gram b - 2 moment' b` (Lawson-Hanson).

    gram: (p, p), positive semi-definite; moment: (p,). Columns that explain nothing get 0.
    """
    size = len(moment)
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    gram = gram / np.outer(scale, scale) + 1e-12 * np.eye(size)
    moment = moment / scale
    tolerance = 1e-10 * max(1.0, float(np.abs(moment).max()))
    active = np.zeros(size, dtype=bool)
    solution: Floats = np.zeros(size)
    for _ in range(3 * size):
        gradient = moment - gram @ solution
        gradient[active] = -np.inf
        entering = int(gradient.argmax())
        if gradient[entering] <= tolerance:
            break
        active[entering] = True
        solution = _feasible(gram, moment, active, solution)
    return np.asarray(solution / scale)


def _feasible(gram: Floats, moment: Floats, active: Bools, start: Floats) -> Floats:
    """Move from `start` to the unconstrained optimum over `active`, without the variables that turn negative on the
    way."""
    current = start
    while active.any():
        goal = np.zeros_like(current)
        index = np.flatnonzero(active)
        goal[index] = np.linalg.solve(gram[np.ix_(index, index)], moment[index])
        blocked = active & (goal <= 0)
        if not blocked.any():
            return goal
        share = float((current[blocked] / np.maximum(current[blocked] - goal[blocked], 1e-300)).min())
        current = current + share * (goal - current)
        active &= current > 1e-14
        current[~active] = 0.0
    return np.zeros_like(current)
