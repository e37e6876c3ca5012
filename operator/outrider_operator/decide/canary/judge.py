"""Is the candidate's goodput above a line? By a confidence sequence, whose error holds at every look.

The effect is `log R`, R = candidate's speed-up / stable's speed-up, with requests as units: the steps of one request
are not independent. An arm's speed-up is the time that plain decoding would have taken for its tokens, over their
price. Both arms share each step's batch and device, and the runtime weights their seconds to the same mix of batch
sizes, so R is the ratio of their goodputs under that mix. Tokens / price would also differ between requests of crowded
and of idle moments. The variance of log R is that of two ratio estimators by the delta method,

    V = sum over arms of (cv_x^2 + cv_y^2 - 2 cv_xy) / n,    x: a request's plain seconds, y: its price,

where cv_x^2 is the variance of x over its squared mean, cv_xy the covariance over the product of the means. The
sequence is Robbins' normal mixture in its asymptotic form (Waudby-Smith and others, "Time-uniform central limit theory
and asymptotic confidence sequences"): with t = n / TUNED_FOR_REQUESTS and c = -2 log(a) + log(1 - 2 log(a)),

    |estimate - log R| <= sqrt(V (1 + 1 / (c t)) (log(1 + c t) - 2 log(a)))    at all n at once, but for a share a.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from outrider_crds.counters import ArmCounters

from outrider_operator.decide.canary.arms import Arms

ERROR_SHARE = 0.05
"""Canaries whose range ever leaves out the true gain."""
GUARD_ERROR_SHARE = 0.01
"""Canaries that the guard on SLO attainment fails by chance."""
TUNED_FOR_REQUESTS = 200.0
"""Requests of each arm at which the range is narrowest for its error. What tells 10% from 0 at the variance of chats:
drafts differ by more than that or hardly at all."""
LEAST_SPECULATED = 0.05
"""Share of its time for which one arm speculates before a candidate is better. Where neither pool pays, both decode
plainly, are equal to the last digit, and nothing is known of the load at which they pay."""
LEAST_EFFECTIVE = 1 / 3
"""Effective requests, as a share of minRequests: a hundred requests of which five carry the sums are few. Chats, whose
lengths differ by 100%, have more."""
MOST_ATTAINMENT_LOST = 0.02
_ROUNDING = 1e-9
"""A variance that is so little below 0 is 0: an arm that decodes plainly has equal price and plain seconds."""
MOST_FAILURES = 1.0
"""A drafter may be suspended once: its device may have been short of memory for a moment."""
MOST_REQUESTS = 10_000_000.0
"""Forecasts end here."""


class CanaryVerdict(StrEnum):
    BETTER = "Better"
    """Above the line, on every product."""
    WORSE = "Worse"
    """Worse than the line, on some product."""
    SLO_LOWERED = "SLOLowered"
    DRAFTER_FAILED = "DrafterFailed"
    OPEN = "Open"


@dataclass(frozen=True)
class Gain:
    """Candidate's speed-up / stable's - 1, and the range that holds the true one."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Judgement:
    verdict: CanaryVerdict
    gains: Mapping[str, Gain | None]
    """Product -> its gain; None while an arm has too few requests."""
    requests_left: float | None
    """More requests of each arm until the verdict, if the gain stays as it is; None where that cannot be foreseen."""
    slo_class: str = ""
    """The class that loses, with SLO_LOWERED."""
    speculates: bool = True
    """Has some arm speculated for long enough, on every product that has its gain?"""


def judge(products: Mapping[str, Arms], *, least_gain: float, min_requests: int) -> Judgement:
    """`least_gain`: the line, -0.03 for 3% less goodput. `min_requests`: of each arm, before the first look."""
    share = ERROR_SHARE / max(1, len(products))  # any of them may fail the candidate by chance
    judged = {name: arms for name, arms in products.items() if _lacking(arms, min_requests) <= 0.0}
    gains = {name: gain(arms, share) if name in judged else None for name, arms in products.items()}
    lowered = _lowered_class(judged.values())
    verdict, speculates = _verdict(products, gains, least_gain, lowered), all(map(_speculates, judged.values()))
    left = [_requests_left(arms, gains[name], least_gain, min_requests, share) for name, arms in products.items()]
    known = [requests for requests in left if requests is not None]
    foreseen = max(known) if known and len(known) == len(left) else None
    return Judgement(verdict, gains, foreseen if verdict is CanaryVerdict.OPEN else 0.0, lowered, speculates)


def gain(arms: Arms, error_share: float = ERROR_SHARE) -> Gain | None:
    """None while an arm has no speed-up, or its requests do not differ enough to say how much they do."""
    estimate, variance = _log_ratio(arms), _variance(arms)
    if estimate is None or variance is None:
        return None
    half = half_width(variance, _pairs(arms), error_share)
    return Gain(*(math.expm1(min(50.0, bound)) for bound in (estimate, estimate - half, estimate + half)))


def half_width(variance: float, requests: float, error_share: float) -> float:
    """`sqrt(V (1 + 1 / (c t)) (log(1 + c t) - 2 log(a)))`."""
    doubled = -2.0 * math.log(error_share)
    scaled = (doubled + math.log1p(doubled)) * requests / TUNED_FOR_REQUESTS
    return math.sqrt(variance * (1.0 + 1.0 / scaled) * (math.log1p(scaled) + doubled))


def _verdict(
    products: Mapping[str, Arms], gains: Mapping[str, Gain | None], least_gain: float, lowered: str
) -> CanaryVerdict:
    if any(arms.candidate.failures > MOST_FAILURES for arms in products.values()):
        return CanaryVerdict.DRAFTER_FAILED
    if any(known is not None and known.high < least_gain for known in gains.values()):
        return CanaryVerdict.WORSE
    if lowered:
        return CanaryVerdict.SLO_LOWERED
    is_better = gains and all(known is not None and known.low > least_gain for known in gains.values())
    if is_better and all(map(_speculates, products.values())):
        return CanaryVerdict.BETTER
    return CanaryVerdict.OPEN


def _lacking(arms: Arms, min_requests: int) -> float:
    """Requests of each arm that are missing before the first look; 0 or less: none."""
    least = max(2, min_requests)
    lacking = least - arms.least_requests
    for arm in (arms.stable, arms.candidate):
        if arm.effective_requests > 0.0:
            lacking = max(lacking, LEAST_EFFECTIVE * least * arm.requests / arm.effective_requests - arm.requests)
    return lacking


def _speculates(arms: Arms) -> bool:
    return max(arms.stable.speculated_share, arms.candidate.speculated_share) >= LEAST_SPECULATED


def _pairs(arms: Arms) -> float:
    """Harmonic mean of the arms' requests: what a variance that is the sum of theirs goes by."""
    return 2.0 / (1.0 / arms.stable.requests + 1.0 / arms.candidate.requests)


def _log_ratio(arms: Arms) -> float | None:
    """`log R`; None while an arm has no speed-up."""
    stable, candidate = arms.stable.speedup, arms.candidate.speedup
    return math.log(candidate / stable) if stable and candidate else None


def _variance(arms: Arms) -> float | None:
    """Variance of the estimate of log R; None where it is not known."""
    stable, candidate = _relative_variance(arms.stable), _relative_variance(arms.candidate)
    if stable is None or candidate is None or stable + candidate <= 0.0:
        return None
    return stable + candidate


def _relative_variance(arm: ArmCounters) -> float | None:
    """`(cv_x^2 + cv_y^2 - 2 cv_xy) / n` of plain seconds / price."""
    number = arm.requests
    if number < 2.0 or not arm.speedup:
        return None
    squares = number * arm.plain_squared / arm.plain_s**2 + number * arm.price_squared / arm.price_s**2
    mixed = number * arm.plain_times_price / (arm.plain_s * arm.price_s)
    variance = (squares - 2.0 * mixed) / (number - 1.0)  # the means of both are 1: nothing is left of them
    if not (math.isfinite(variance) and variance > -_ROUNDING):
        return None
    return max(0.0, variance)


def _lowered_class(products: Iterable[Arms]) -> str:
    """The first SLO class that the candidate attains less often, by more than it may; empty if none."""
    total = sum(products, Arms())
    classes = sorted(set(total.stable.finished) & set(total.candidate.finished))
    share = GUARD_ERROR_SHARE / max(1, len(classes))
    return next((name for name in classes if _attainment_lost(total, name, share) > MOST_ATTAINMENT_LOST), "")


def _attainment_lost(arms: Arms, name: str, error_share: float) -> float:
    """The least that the candidate loses of the class' attainment, within the error."""
    lost, variance, counts = 0.0, 0.0, []
    for arm, sign in ((arms.stable, 1.0), (arms.candidate, -1.0)):
        finished = arm.finished[name]
        if finished < 1.0:
            return 0.0
        attained = min(arm.attained.get(name, 0.0), finished)  # a pod may report anything
        smoothed = (attained + 1.0) / (finished + 2.0)  # a class that was always met has a variance all the same
        lost += sign * attained / finished
        variance += smoothed * (1.0 - smoothed) / finished
        counts.append(finished)
    return lost - half_width(variance, 2.0 / sum(1.0 / count for count in counts), error_share)


def _requests_left(
    arms: Arms, range_now: Gain | None, least_gain: float, min_requests: int, error_share: float
) -> float | None:
    """More requests of each arm until the range leaves the line out, by doubling and halving."""
    if range_now is None:
        left = _lacking(arms, min_requests)
        return left if left > 0.0 else None
    estimate, variance, pairs = _log_ratio(arms), _variance(arms), _pairs(arms)
    if estimate is None or variance is None:
        return None
    distance = abs(estimate - math.log1p(least_gain))

    def is_enough(requests: float) -> bool:
        return half_width(variance * pairs / requests, requests, error_share) < distance

    low, high = pairs, pairs
    while not is_enough(high):
        low, high = high, 2.0 * high
        if high > MOST_REQUESTS:
            return None
    for _ in range(30):
        middle = (low + high) / 2.0
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return max(0.0, high - pairs)
