"""What a drafter's confidence has been worth: calibrated online, for each drafter and depth."""

from __future__ import annotations

import numpy as np
import pytest
from outrider_runtime.loop.confidences import (
    REFIT_STEPS,
    START_INTERCEPT,
    START_SLOPE,
    UNKNOWN,
    Calibrator,
    confidences,
)

from tests.unit.control import columns

REQUESTS, LONGEST = 32, 3
SLOPE, INTERCEPTS = 1.2, np.array([0.5, -0.5, -1.5])


def trained(steps: int, slope: float = SLOPE, confidence: float | None = None) -> Calibrator:
    """The second of two drafters, whose tokens are accepted with 1 / (1 + exp(-(slope * confidence + intercept)))."""
    made, rng = Calibrator(2, LONGEST), np.random.default_rng(0)
    for _ in range(steps):
        said = rng.normal(size=REQUESTS * LONGEST) if confidence is None else np.full(REQUESTS * LONGEST, confidence)
        forest = columns.proposals([LONGEST] * REQUESTS, drafter=1, drafters=2, confidence=said)
        chances = 1 / (1 + np.exp(-(slope * np.nan_to_num(said) + INTERCEPTS[forest.depth - 1])))
        stands = (rng.random(len(said)) < chances).reshape(REQUESTS, LONGEST)
        accepted = stands.cumprod(axis=1).astype(bool)
        tried = np.hstack([np.ones((REQUESTS, 1), bool), accepted[:, :-1]])
        made.observe(forest, tried.ravel(), accepted.ravel())
    return made


def test_slope_and_intercepts_are_those_of_the_traffic() -> None:
    slopes, intercepts = trained(40 * REFIT_STEPS).current
    assert slopes[1] == pytest.approx(SLOPE, abs=0.1)
    assert intercepts[1] == pytest.approx(INTERCEPTS, abs=0.15)


def test_a_drafter_without_trials_keeps_its_start_values() -> None:
    slopes, intercepts = trained(2 * REFIT_STEPS).current
    assert slopes[0] == np.float32(START_SLOPE)
    assert intercepts[0].tolist() == [np.float32(START_INTERCEPT)] * LONGEST


def test_tokens_without_confidence_are_calibrated_by_depth() -> None:
    calibrator = trained(20 * REFIT_STEPS, confidence=np.nan)
    drafter, depth = np.ones(LONGEST, int), np.arange(LONGEST)
    chances = calibrator.acceptance(drafter, depth, np.zeros(LONGEST))
    assert chances == pytest.approx(1 / (1 + np.exp(-INTERCEPTS)), abs=0.03)


def test_confidence_that_misleads_never_turns_the_order_around() -> None:
    """A slope below 0 would verify what a drafter is unsure of first. Bug: a refit that led below 0 was left out, and
    the start value stayed; the intercepts could not make up for it."""
    calibrator = trained(10 * REFIT_STEPS, slope=-1.0)
    assert calibrator.current.slopes[1] == 0
    confidence = np.array([-4.0, 0.0, 4.0])
    assert np.ptp(calibrator.acceptance(np.ones(3, int), np.zeros(3, int), confidence)) == 0


def test_extreme_confidences_stay_finite() -> None:
    for confidence in (-16.0, 16.0):
        calibrator = trained(3 * REFIT_STEPS, confidence=confidence)
        assert np.isfinite(calibrator.current.slopes).all()
        assert np.isfinite(calibrator.current.intercepts).all()


def test_trials_that_change_their_mind_are_followed_again() -> None:
    """Bug: tokens that were accepted after long refusal weighed nothing, and one refit moved an intercept from -21 to
    5101. Nothing moved it back, so the device ranked by nonsense until the pod ended."""
    calibrator, confidence = Calibrator(1, 1), np.full(4, 4.0)
    forest = columns.proposals([1] * 4, drafter=0, drafters=1, confidence=confidence)
    for accepted in (False, True, False):
        for _ in range(30 * REFIT_STEPS):
            calibrator.observe(forest, np.ones(4, bool), np.full(4, accepted))
        chance = calibrator.acceptance(np.zeros(1, int), np.zeros(1, int), confidence[:1])[0]
        assert chance == pytest.approx(float(accepted), abs=0.02)
        assert np.abs(calibrator.current.intercepts).max() < 30


def test_an_int8_is_an_eighth_and_one_value_says_nothing() -> None:
    said = confidences(np.array([-127, 0, 12, 127, UNKNOWN], np.int8))
    assert said.tolist() == pytest.approx([-15.875, 0.0, 1.5, 15.875, np.nan], nan_ok=True)
