"""Fit a step's cost to measurements: non-negative least squares, a search for the knee, the smallest form that holds.

Used offline by the profiler (with its error on shapes that were held out) and online where no profile is mounted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.costs import FREE, Shape, StepCost
from outrider_runtime.control.least_squares import non_negative

Floats = NDArray[np.float64]
MAX_KNEES = 24
LOGITS = 6
"""Column of the tokens with logits."""
LARGER_FORM_GAIN = 0.85
"""A larger form is kept only if it brings the held-out error to this share of the smaller one's, or lower."""
GOOD_ERROR = 0.02
"""Below this error no larger form is tried."""


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
    """An autoregressive drafter's passes after the first, each of this shape; `seconds` is the sum over all."""
    later_passes: int = 0
    apart: bool = False
    """Of a kind of step whose constant is another one (`Fit.apart_s`), fitted together with those that are not."""


@dataclass(frozen=True, slots=True)
class Fit:
    cost: StepCost
    first_pass: StepCost
    """What the first of several passes costs beyond a pass; nothing where it was not asked for."""
    form: Form
    error: float
    """Median relative error on the held-out samples (on the fitted ones where none were held out)."""
    apart_s: float = 0.0
    """What samples `apart` cost beyond `cost`."""

    def predicted_s(self, sample: Sample) -> float:
        """What this fit says the sample took, all of its passes together."""
        seconds = self.cost.seconds(sample.shape) + self.first_pass.seconds(sample.shape)
        if sample.later is not None:
            seconds += sample.later_passes * self.cost.seconds(sample.later)
        return seconds + self.apart_s if sample.apart else seconds

    def relative_error(self, sample: Sample) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s(sample) / sample.seconds - 1.0)


def fit(
    samples: Sequence[Sample], held_out: Sequence[Sample] = (), forms: Sequence[Form] = tuple(Form),
    *, first_pass: bool = False,
) -> Fit:  # fmt: skip
    """The smallest of `forms` that holds. `first_pass`: the first pass has a constant and a slope of its own on top.

    Raises ValueError without a sample, or for one whose time is not a positive number.
    """
    _check(samples)
    judges = held_out or samples
    best = _fit_form(samples, forms[0], judges, first_pass)
    for form in forms[1:]:
        if best.error <= GOOD_ERROR:
            break
        larger = _fit_form(samples, form, judges, first_pass)
        if larger.error < LARGER_FORM_GAIN * best.error:
            best = larger
    return best


def _fit_form(samples: Sequence[Sample], form: Form, judges: Sequence[Sample], first_pass: bool) -> Fit:
    solutions = (_solve(samples, form, knee, first_pass) for knee in _knees(samples))
    best, _ = min(solutions, key=lambda solution: solution[1])
    return replace(best, error=float(np.median([best.relative_error(sample) for sample in judges])))


def _knees(samples: Sequence[Sample]) -> list[float]:
    """Candidates: no knee, and batch sizes with at least two sizes measured on either side."""
    sizes = sorted({sample.shape.n_batched for sample in samples})
    inner = sizes[1:-2]
    if len(inner) > MAX_KNEES:
        inner = [inner[round(i)] for i in np.linspace(0, len(inner) - 1, MAX_KNEES)]
    return [0.0, *inner]


def _solve(samples: Sequence[Sample], form: Form, knee: float, first_pass: bool) -> tuple[Fit, float]:
    """Coefficients for one knee, and the weighted squared relative error they leave."""
    design = np.array([_passes(sample, form, knee) for sample in samples])  # (samples, 7)
    if not any(sample.shape.n_prompt for sample in samples):
        design[:, LOGITS] = 0.0  # every token has logits: the term cannot be told from that of batched tokens
    more = [_more(sample, first_pass) for sample in samples]  # (samples, 3)
    design = np.hstack([design, more])
    seconds = np.array([sample.seconds for sample in samples])
    weight = np.sqrt([sample.weight for sample in samples]) / seconds
    x, y = design * weight[:, None], seconds * weight
    solution = non_negative(x.T @ x, x.T @ y)
    context, batched, above, request, query, constant, logits, first_s, first_token_s, apart_s = solution.tolist()
    cost = StepCost(context, batched, above, knee if above > 0 else 0.0, request, query, constant, logits)
    first = StepCost(constant_s=first_s, per_batched_token_s=first_token_s) if first_pass else FREE
    return Fit(cost, first, form, math.nan, apart_s), float(np.square(x @ solution - y).sum())


def _more(sample: Sample, first_pass: bool) -> tuple[float, float, float]:
    """Terms that some samples alone have: constant and slope of the first of several passes, and what sets them apart.
    A column of zeros asks for nothing."""
    first = (1.0, sample.shape.n_batched) if first_pass else (0.0, 0.0)
    return (*first, float(sample.apart))


def _passes(sample: Sample, form: Form, knee: float) -> Floats:
    """(7,): terms summed over the sample's forward passes."""
    terms = np.array(_features(sample.shape, form, knee))
    if sample.later is not None:
        terms += sample.later_passes * np.array(_features(sample.later, form, knee))
    return terms


def _features(shape: Shape, form: Form, knee: float) -> tuple[float, ...]:
    above = max(0.0, shape.n_batched - knee) if knee > 0 else 0.0
    requests = shape.n_requests if form in (Form.PER_REQUEST, Form.FULL) else 0.0
    query = shape.n_context_query if form in (Form.PER_CONTEXT_QUERY, Form.FULL) else 0.0
    return (shape.n_context, shape.n_batched, above, requests, query, 1.0, shape.n_batched - shape.n_prompt)


def _check(samples: Sequence[Sample]) -> None:
    if not samples:
        raise ValueError("fit: no samples; measure at least one shape")
    for sample in samples:
        if not (np.isfinite(sample.seconds) and sample.seconds > 0):
            raise ValueError(f"fit: {sample.seconds} is no step time (shape {sample.shape}); drop that measurement")
