"""The judge of a canary: its four outcomes, its error rate, and how it judges sums that a tenant's image may forge."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from outrider_crds.counter_sums import MOST_COUNTED
from outrider_crds.counters import ArmCounters
from outrider_operator.decide.canary.arms import Arms
from outrider_operator.decide.canary.judge import CanaryVerdict, gain, half_width, judge

from bench.canary_requests import Floats, arm, canary, sums


def arms(requests: int, true_gain: float, seed: int = 0) -> Arms:
    """Return both arms, each after so many simulated requests."""
    rng, looks = np.random.default_rng(seed), np.array([requests])
    return Arms(*(sums(*arm(rng, requests, gain_of_arm), looks)[0] for gain_of_arm in (0.0, true_gain)))


def verdict(both_arms: Arms, least_gain: float = -0.03) -> CanaryVerdict:
    return judge({"H200": both_arms}, least_gain=least_gain, min_requests=100).verdict


@pytest.mark.parametrize(
    ("true_gain", "expected"),
    [
        (0.1, CanaryVerdict.BETTER),
        (-0.1, CanaryVerdict.WORSE),
        (-0.5, CanaryVerdict.WORSE),
        (-0.03, CanaryVerdict.OPEN),
    ],
)
def test_a_thousand_requests_tell_ten_percent_from_the_line(true_gain: float, expected: CanaryVerdict) -> None:
    assert verdict(arms(1000, true_gain)) is expected


def test_equal_arms_are_as_good_by_the_default_line() -> None:
    """The default is -3%: a draft that changes nothing passes, after enough requests."""
    assert verdict(arms(6000, 0.0)) is CanaryVerdict.BETTER
    assert verdict(arms(6000, 0.0), least_gain=0.0) is CanaryVerdict.OPEN


def test_a_worked_range() -> None:
    """Four requests: x = 1, 3 and y = 1, 1 in each arm. cv_x^2 = 0.5, cv_y = cv_xy = 0, so V = 2 * 0.5 / 2 = 0.5; at
    n = 2, a = 0.05: c t = (5.991 + log 6.991) * 2 / 200 = 0.07936, half = sqrt(0.5 * 13.60 * (0.07637 + 5.991))."""
    counters = ArmCounters(
        requests=2, plain_s=4, speculated_s=4, price_s=2, plain_squared=10, price_squared=2, plain_times_price=4
    )
    assert half_width(0.5, 2, 0.05) == pytest.approx(6.42, abs=0.01)
    result = gain(Arms(counters, counters))
    assert result is not None
    assert (result.value, math.log1p(result.low), math.log1p(result.high)) == pytest.approx(
        (0.0, -6.42, 6.42), abs=0.01
    )


def test_it_says_nothing_before_the_least_requests() -> None:
    """An arm with half the goodput is not judged either: the next requests may differ."""
    result = judge({"H200": arms(99, -0.5)}, least_gain=-0.03, min_requests=100)
    assert (result.verdict, result.gains, result.requests_left) == (CanaryVerdict.OPEN, {"H200": None}, 1)


def test_plainly_decoding_arms_are_no_evidence_for_candidate() -> None:
    """Bug: where neither pool paid, both were equal to the last digit, and any candidate was better than -3%."""
    plain = ArmCounters(requests=5000, plain_s=5000.0, price_s=5000.0, plain_squared=6000.0, price_squared=6000.0,
                    plain_times_price=6000.0)  # fmt: skip
    barely = plain.model_copy(update={"plain_squared": 6100.0, "speculated_s": 100.0})
    result = judge({"H200": Arms(barely, barely)}, least_gain=-0.03, min_requests=100)
    assert (result.verdict, result.speculates) == (CanaryVerdict.OPEN, False)
    often = barely.model_copy(update={"speculated_s": 500.0})
    assert verdict(Arms(barely, often)) is CanaryVerdict.BETTER


def test_plainly_decoding_arm_has_a_range_with_a_speculating_one() -> None:
    """Bug: rounding made its variance slightly negative, which counted as unknown, and no verdict ever came."""
    exact = ArmCounters(requests=1000, plain_s=1000.0, price_s=1000.0, plain_squared=2000.0, price_squared=2000.0,
                    plain_times_price=2000.0 + 1e-10)  # fmt: skip
    assert verdict(Arms(arms(1000, 0.0).stable, exact)) is CanaryVerdict.WORSE


def test_requests_of_which_few_carry_the_sums_are_too_few() -> None:
    """Lone requests cost thirty times those of a crowd: a hundred of both are a handful."""
    rng = np.random.default_rng(0)
    plain_s = np.where(np.arange(1000) % 20 == 0, 30.0, 1.0)
    price_s = plain_s * rng.lognormal(0.0, 0.2, 1000)
    few, many = (sums(plain_s[:count], price_s[:count], np.array([count]))[0] for count in (200, 1000))
    first = judge({"a": Arms(few, few)}, least_gain=-0.5, min_requests=100)
    assert first.gains == {"a": None}
    assert first.requests_left == pytest.approx(60, abs=40)
    assert judge({"a": Arms(many, many)}, least_gain=-0.5, min_requests=100).gains["a"] is not None


def test_the_requests_that_are_left_lead_to_a_verdict() -> None:
    """The status derives the time left from this number and the current traffic."""
    early = arms(400, 0.03)
    result = judge({"H200": early}, least_gain=-0.03, min_requests=100)
    assert result.verdict is CanaryVerdict.OPEN
    assert result.requests_left is not None
    scale = (400 + result.requests_left) / 400
    later = Arms(*(_scaled(counters, scale) for counters in (early.stable, early.candidate)))
    assert verdict(later) is CanaryVerdict.BETTER
    sooner = Arms(*(_scaled(counters, 1 + 0.95 * (scale - 1)) for counters in (early.stable, early.candidate)))
    assert verdict(sooner) is CanaryVerdict.OPEN


def test_no_product_may_lose() -> None:
    """Better on one product and worse on another is worse; better on one and open on another is open."""
    better, worse, unknown = arms(1000, 0.1), arms(1000, -0.1), arms(50, 0.1)
    for other, expected in (
        (worse, CanaryVerdict.WORSE),
        (unknown, CanaryVerdict.OPEN),
        (better, CanaryVerdict.BETTER),
    ):
        assert judge({"a": better, "b": other}, least_gain=-0.03, min_requests=100).verdict is expected


def test_a_class_that_is_attained_less_fails_the_candidate() -> None:
    """More goodput at the expense of one class: 90% of `chat` attain their SLO instead of 98%; `bulk` is as before."""
    finished = {"chat": 2000, "bulk": 2000}
    both_arms = arms(4000, 0.1)
    stable = _with(both_arms.stable, finished, {"chat": 1960, "bulk": 1800})
    for chat, expected in ((1800, (CanaryVerdict.SLO_LOWERED, "chat")), (1930, (CanaryVerdict.BETTER, ""))):
        candidate = _with(both_arms.candidate, finished, {"chat": chat, "bulk": 1800})
        result = judge({"a": Arms(stable, candidate)}, least_gain=-0.03, min_requests=100)
        assert (result.verdict, result.slo_class) == expected


def test_a_drafter_may_be_suspended_once() -> None:
    for failures, expected in ((1, CanaryVerdict.BETTER), (2, CanaryVerdict.DRAFTER_FAILED)):
        both_arms = arms(1000, 0.1)
        failing = _with(both_arms.candidate, {}, {}, failures)
        assert verdict(Arms(both_arms.stable, failing)) is expected


@pytest.mark.slow
def test_equal_arms_get_a_verdict_in_at_most_five_percent() -> None:
    """A/A with the line at 0, where either verdict is false, looked at after every fifth more requests."""
    rng = np.random.default_rng(1)
    looks = np.unique(np.geomspace(100, 6000, 84).astype(np.int64))
    verdicts = [canary(rng, 0.0, 0.0, looks).verdict for _ in range(1000)]
    assert sum(verdict is not CanaryVerdict.OPEN for verdict in verdicts) <= 50


NUMBERS = st.floats(0, MOST_COUNTED) | st.sampled_from([0.0, 1e-9, 1.0, float(MOST_COUNTED)])


@given(st.lists(NUMBERS, min_size=18, max_size=18), st.floats(-0.5, 1.0), st.integers(1, 1000))
@example([*[1000.0] * 14, 1.0, 1e6, 1.0, 1e6], 0.0, 100)
def test_any_sums_are_judged(numbers: list[float], least_gain: float, min_requests: int) -> None:
    """A pod runs a tenant's image: squares below their means, requests without tokens, prices of 10^18 seconds, more
    requests that met their class than requests."""
    stable, candidate = _arm(*numbers[:7]), _arm(*numbers[7:14])
    both_arms = Arms(
        stable.model_copy(update={"finished": {"chat": numbers[14]}, "attained": {"chat": numbers[15]}}),
        candidate.model_copy(update={"finished": {"chat": numbers[16]}, "attained": {"chat": numbers[17]}}),
    )
    result = judge({"a": both_arms}, least_gain=least_gain, min_requests=min_requests)
    for known in result.gains.values():
        assert known is None or -1.0 <= known.low <= known.value <= known.high < math.inf
    assert result.requests_left is None or 0.0 <= result.requests_left < math.inf


@given(st.floats(1e-6, 1e3), st.integers(1, 10**6), st.floats(0.001, 0.2))
def test_the_range_narrows_with_requests(variance: float, requests: int, share: float) -> None:
    """The variance goes down with them; a smaller error takes a wider range."""
    width = half_width(variance, requests, share)
    assert half_width(variance / 2, 2 * requests, share) < width < half_width(variance, requests, share / 2)


def test_common_variation_of_both_times_hardly_widens_the_range() -> None:
    """Bug: by tokens / price a canary on shared cores took six times the requests for the same verdict."""
    rng = np.random.default_rng(0)
    plain_s, price_s = rng.lognormal(0.0, 1.0, 400), rng.lognormal(0.0, 0.2, 400)
    moment = rng.lognormal(0.0, 0.5, 400)
    steady, moving = (_range_of(plain_s * factor, plain_s * price_s * factor) for factor in (np.ones(400), moment))
    assert moving < 1.5 * steady


def _range_of(plain_s: Floats, price_s: Floats) -> float:
    """Width of the range of two arms that have these requests both."""
    sums_of_arm = sums(plain_s, price_s, np.array([len(plain_s)]))[0]
    known = gain(Arms(sums_of_arm, sums_of_arm))
    assert known is not None
    return known.high - known.low


@given(st.integers(0, 50), st.floats(0.1, 10.0))
def test_a_price_in_another_unit_changes_nothing(seed: int, unit: float) -> None:
    both_arms = arms(300, 0.05, seed)
    other = Arms(*(_priced(counters, unit) for counters in (both_arms.stable, both_arms.candidate)))
    before, after = gain(both_arms), gain(other)
    assert before is not None
    assert after is not None
    assert (after.value, after.low, after.high) == pytest.approx((before.value, before.low, before.high), rel=1e-6)


def _arm(
    requests: Any, plain_s: float, price_s: float, xx: float, yy: float, xy: float, failures: Any = 0
) -> ArmCounters:
    return ArmCounters.model_construct(
        requests=requests, plain_s=plain_s, speculated_s=plain_s, price_s=price_s,
        plain_squared=xx, price_squared=yy, plain_times_price=xy, failures=failures,
    )  # fmt: skip


def _with(counters: ArmCounters, finished: dict[str, int], attained: dict[str, int], failures: int = 0) -> ArmCounters:
    return counters + ArmCounters(failures=failures, finished=finished, attained=attained)


def _scaled(counters: ArmCounters, by: float) -> ArmCounters:
    """More requests of the same kind."""
    return _arm(*(by * number for number in _numbers(counters)))


def _priced(counters: ArmCounters, unit: float) -> ArmCounters:
    requests, plain_s, price_s, xx, yy, xy = _numbers(counters)
    return _arm(requests, plain_s, unit * price_s, xx, unit**2 * yy, unit * xy)


def _numbers(counters: ArmCounters) -> tuple[float, float, float, float, float, float]:
    squares = (counters.plain_squared, counters.price_squared, counters.plain_times_price)
    return (counters.requests, counters.plain_s, counters.price_s, *squares)
