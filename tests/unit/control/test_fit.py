"""One cost, fitted to measurements."""

from __future__ import annotations

import numpy as np
from outrider_runtime.control.cost.fit import Form, Sample, fit
from outrider_runtime.control.cost.model import Shape, StepCost

TARGET = StepCost(1e-8, 4e-5, 1e-4, 64.0, constant_s=0.01)


def test_held_out_shapes_have_no_say_in_the_form():
    """The error that is reported would be too low, if the form were chosen by it."""
    rng = np.random.default_rng(0)
    shapes = [Shape(n * c, n, n, n * c / 1000) for n in (1, 2, 4, 8, 16, 32, 64) for c in (100, 1000, 4000)]
    samples = [Sample(shape, TARGET.seconds(shape) * rng.uniform(0.99, 1.05)) for shape in shapes]
    odd = [Sample(shape, TARGET.seconds(shape) * 2 + 1e-3 * shape.n_requests) for shape in shapes]
    assert fit(samples, odd).form is fit(samples).form
    assert fit(samples, odd).error > 0.4


def test_the_knee_is_found():
    shapes = [Shape(0, n, n) for n in (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256)]
    found = fit([Sample(shape, TARGET.seconds(shape)) for shape in shapes], forms=(Form.BASE,))
    assert found.cost.knee_tokens == 64
    assert found.error < 1e-3
