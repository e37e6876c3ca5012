"""Requests that a canary takes for its verdict, and how often the verdict is wrong: `python -m bench.canary_requests`.

Lengths, tokens per step and the moment's step time are log-normal, with coefficients of variation 1, 0.2 and 0.5; the
moment scales the time of a plain step and the price of a step alike. A candidate's requests get 1 + gain times the
tokens per step. Each canary is judged after every tenth request. With `--long-percent`, that share of the requests is
30 times as long and gets 3 times the tokens per step, as when a text is copied.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from outrider_crds.counters import ArmCounters
from outrider_operator.decide.canary.arms import Arms
from outrider_operator.decide.canary.judge import CanaryVerdict, judge

MEAN_TOKENS = 200.0
LENGTH_CV = 1.0
TOKENS_PER_STEP, REQUEST_CV = 2.5, 0.2
PLAIN_S, PRICE_S = 0.025, 0.03
"""Seconds of a plain step, and of one that speculates, at a usual moment."""
MOMENT_CV = 0.5
LONG_LENGTH, LONG_TOKENS_PER_STEP = 30.0, 3.0
"""Factors of a long request's length and tokens a step."""
MIN_REQUESTS = 100
LOOK_EVERY = 10
GAINS_PERCENT = (10.0, 5.0, 3.0, 0.0, -3.0, -5.0, -6.0, -10.0, -15.0, -50.0)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    verdict: CanaryVerdict
    requests: int
    """Requests of each arm."""


def arm(rng: np.random.Generator, requests: int, gain: float, long_share: float = 0.0) -> tuple[Floats, Floats]:
    """Draw (seconds of plain decoding, price in seconds) of each request."""
    is_long = rng.random(requests) < long_share if long_share else np.zeros(requests, bool)
    lengths = _log_normal(rng, requests, MEAN_TOKENS, LENGTH_CV) * np.where(is_long, LONG_LENGTH, 1.0)
    tokens = np.maximum(1.0, np.round(lengths))
    per_step = _log_normal(rng, requests, TOKENS_PER_STEP * (1.0 + gain), REQUEST_CV)
    per_step *= np.where(is_long, LONG_TOKENS_PER_STEP, 1.0)
    moment = _log_normal(rng, requests, 1.0, MOMENT_CV)
    return tokens * PLAIN_S * moment, np.maximum(1.0, np.round(tokens / per_step)) * PRICE_S * moment


def sums(plain_s: Floats, price_s: Floats, looks: NDArray[np.int64]) -> list[ArmCounters]:
    """Return the sums after each number of requests in `looks`."""
    columns = (plain_s, price_s, plain_s**2, price_s**2, plain_s * price_s)
    rows = np.stack([np.cumsum(column)[looks - 1] for column in columns], axis=1)
    return [_arm_sums(int(count), *map(float, row)) for count, row in zip(looks, rows, strict=True)]


def _arm_sums(count: int, x: float, y: float, xx: float, yy: float, xy: float) -> ArmCounters:
    return ArmCounters(
        requests=count, plain_s=x, speculated_s=x, price_s=y, plain_squared=xx, price_squared=yy, plain_times_price=xy
    )


def canary(
    rng: np.random.Generator, gain: float, line: float, looks: NDArray[np.int64], long_share: float = 0.0
) -> Outcome:
    """Run one canary from its first look, at minRequests, to its verdict or its last look."""
    stable = sums(*arm(rng, int(looks[-1]), 0.0, long_share), looks)
    candidate = sums(*arm(rng, int(looks[-1]), gain, long_share), looks)
    for count, arms in zip(looks, map(Arms, stable, candidate), strict=True):
        verdict = judge({"cpu": arms}, least_gain=line, min_requests=int(looks[0])).verdict
        if verdict is not CanaryVerdict.OPEN:
            return Outcome(verdict, int(count))
    return Outcome(CanaryVerdict.OPEN, int(looks[-1]))


def row(gain_percent: float, line_percent: float, options: argparse.Namespace) -> str:
    rng, canaries = np.random.default_rng(0), options.canaries
    looks, share = np.arange(options.min_requests, options.most_requests + 1, LOOK_EVERY), options.long_percent / 100
    outcomes = [canary(rng, gain_percent / 100, line_percent / 100, looks, share) for _ in range(canaries)]
    taken = sorted(outcome.requests for outcome in outcomes if outcome.verdict is not CanaryVerdict.OPEN)
    median, ninth = (f"{np.quantile(taken, share):,.0f}" if taken else "" for share in (0.5, 0.9))
    shares = " | ".join(
        f"{100 * sum(outcome.verdict is verdict for outcome in outcomes) / canaries:.1f}%"
        for verdict in (CanaryVerdict.BETTER, CanaryVerdict.WORSE, CanaryVerdict.OPEN)
    )
    return f"| {gain_percent:+.0f}% | {line_percent:+.0f}% | {median} | {ninth} | {shares} |"


def _log_normal(rng: np.random.Generator, count: int, mean: float, variation: float) -> Floats:
    sigma = np.sqrt(np.log1p(variation**2))
    return rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--canaries", type=int, default=1000)
    parser.add_argument("--most-requests", type=int, default=6000, help="of each arm")
    parser.add_argument("--min-requests", type=int, default=MIN_REQUESTS)
    parser.add_argument("--long-percent", type=float, default=0.0, help="of the requests")
    parser.add_argument("--gain", type=float, nargs="+", default=GAINS_PERCENT, help="true gain in percent")
    parser.add_argument("--line", type=float, nargs="+", default=[-3.0, 0.0], help="leastGainPercent")
    options = parser.parse_args()
    print(
        "| true gain | leastGainPercent | requests of each arm, median | 90% quantile | Better | Worse | no verdict |"
    )
    print("|---|---|---|---|---|---|---|")
    for line in options.line:
        for gain in options.gain:
            print(row(gain, line, options), flush=True)


if __name__ == "__main__":
    main()
