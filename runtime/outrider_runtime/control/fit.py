"""Fit a step's cost to measurements: non-negative least squares, a search for the knee, the smallest form that holds.

Used offline by the profiler (with its error on shapes that were held out) and online where no profile is mounted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Fit:
    cost: StepCost
    first_pass: StepCost
    """What the first of several passes costs beyond a pass; nothing where it was not asked for."""
    form: Form
    error: float
    """Median relative error on the held-out samples (on the fitted ones where none were held out)."""


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


def relative_error(cost: StepCost, samples: Sequence[Sample], first_pass: StepCost = FREE) -> float:
    """Median of |predicted - measured| / measured."""
    return float(np.median([abs(predicted_s(cost, s, first_pass) - s.seconds) / s.seconds for s in samples]))


def predicted_s(cost: StepCost, sample: Sample, first_pass: StepCost = FREE) -> float:
    """What `cost` says the sample took, all of its passes together."""
    first = cost.seconds(sample.shape) + first_pass.seconds(sample.shape)
    return first if sample.later is None else first + sample.later_passes * cost.seconds(sample.later)


def _fit_form(samples: Sequence[Sample], form: Form, judges: Sequence[Sample], first_pass: bool) -> Fit:
    solutions = (_solve(samples, form, knee, first_pass) for knee in _knees(samples))
    cost, first, _ = min(solutions, key=lambda solution: solution[2])
    return Fit(cost, first, form, relative_error(cost, judges, first))


def _knees(samples: Sequence[Sample]) -> list[float]:
    """Candidates: no knee, and batch sizes with at least two sizes measured on either side."""
    sizes = sorted({sample.shape.n_batched for sample in samples})
    inner = sizes[1:-2]
    if len(inner) > MAX_KNEES:
        inner = [inner[round(i)] for i in np.linspace(0, len(inner) - 1, MAX_KNEES)]
    return [0.0, *inner]


def _solve(
    samples: Sequence[Sample], form: Form, knee: float, first_pass: bool
) -> tuple[StepCost, StepCost, float]:  # fmt: skip
    """Coefficients for one knee, those of the first pass, and the weighted squared relative error they leave."""
    design = np.array([_passes(sample, form, knee) for sample in samples])  # (samples, 7)
    if not any(sample.shape.n_prompt for sample in samples):
        design[:, LOGITS] = 0.0  # every token has logits: the term cannot be told from that of batched tokens
    if first_pass:
        design = np.hstack([design, [[1.0, sample.shape.n_batched] for sample in samples]])
    seconds = np.array([sample.seconds for sample in samples])
    weight = np.sqrt([sample.weight for sample in samples]) / seconds
    x, y = design * weight[:, None], seconds * weight
    solution = non_negative(x.T @ x, x.T @ y)
    context, batched, above, request, query, constant, logits, *extra = (float(value) for value in solution)
    cost = StepCost(context, batched, above, knee if above > 0 else 0.0, request, query, constant, logits)
    first = StepCost(constant_s=extra[0], per_batched_token_s=extra[1]) if extra else FREE
    return cost, first, float(np.square(x @ solution - y).sum())


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
