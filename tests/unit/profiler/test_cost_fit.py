"""One cost, fitted to measurements."""

from __future__ import annotations

import numpy as np
from outrider_runtime.control.step_times import Shape, StepCost
from outrider_runtime.profiler.cost_fit import Form, Sample, fit

TARGET = StepCost(1e-8, 4e-5, 1e-4, 64.0, constant_s=0.01)


def test_held_out_samples_do_not_choose_the_form():
    """If held-out samples chose the form, the reported error would be too low."""
    rng = np.random.default_rng(0)
    shapes = [Shape(n * c, n, n, n * c / 1000) for n in (1, 2, 4, 8, 16, 32, 64) for c in (100, 1000, 4000)]
    samples = [Sample(shape, TARGET.seconds(shape) * rng.uniform(0.99, 1.05)) for shape in shapes]
    odd = [Sample(shape, TARGET.seconds(shape) * 2 + 1e-3 * shape.n_requests) for shape in shapes]
    assert fit(samples, odd).form is fit(samples).form
    assert fit(samples, odd).error > 0.4


def test_fit_finds_the_knee():
    shapes = [Shape(0, n, n) for n in (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256)]
    fitted = fit([Sample(shape, TARGET.seconds(shape)) for shape in shapes], forms=(Form.BASE,))
    assert fitted.cost.knee_tokens == 64
    assert fitted.error < 1e-3
