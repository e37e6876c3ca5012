"""Whether one offset a request would estimate acceptance better than the core's counts: on recorded proposals.

    python -m bench.acceptance_estimators     writes results/acceptance_estimators.json (a minute of one core)

Sixteen requests at a time replay recorded answers: at every step each is proposed K tokens, and keeps those that the
target accepted. Both estimators predict every trial, P(token k accepted | k - 1 accepted), before they learn from it:

    counts    the core's (`control.acceptance`): decaying counts by depth, times a factor on the odds for the request
    offset    logit P = rate[k] + offset[request], both Gaussian, moved by the residual of every trial (Rasch, by an
              extended Kalman filter); its three variances are those of the lowest log loss on the other half of answers

A prediction scores -log of the probability that it gave to what happened (log loss, lower is better). The calibration
error is the mean distance of predicted from observed rates in ten equal bins.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from outrider_runtime.control.acceptance import PRIOR, Acceptance, factor_of, with_factor
from outrider_runtime.control.batch import Floats, Ints
from outrider_runtime.control.settings import Drafter, HotSettings, Settings
from outrider_runtime.simulate.recording import Recording, lift, load_shipped, load_shipped_with_block_head

from tests.unit.control import columns

RESULTS = Path(__file__).parent / "results" / "acceptance_estimators.json"
REQUESTS, DEPTHS, SEEDS = 16, 5, 4
BINS = 10
LEAST_CHANCE = 1e-6


class Trials(NamedTuple):
    """One step of all requests."""

    new: Ints
    """Requests that begin with this step."""
    lengths: Ints
    """(N,): proposed tokens."""
    accepted: Ints
    """(N,): how many of them the target accepted."""

    def pairs(self) -> Iterator[tuple[int, int, bool]]:
        """Yield (request, depth from 0, accepted) of every trial: the first rejected token is the last one."""
        for request, (length, accepted) in enumerate(zip(self.lengths.tolist(), self.accepted.tolist(), strict=True)):
            for depth in range(min(length, accepted + 1)):
                yield request, depth, depth < accepted


class Estimator(Protocol):
    def begin(self, requests: Ints) -> None: ...
    def predict(self, request: int, depth: int) -> float: ...
    def learn(self, step: Trials) -> None: ...


class CountsEstimator:
    """The control core's estimator."""

    def __init__(self) -> None:
        settings = Settings((Drafter("drafter"),), DEPTHS, REQUESTS, hot=HotSettings(max_draft_tokens=DEPTHS))
        self._acceptance = Acceptance(settings)

    def begin(self, requests: Ints) -> None:
        self._acceptance.release(requests)

    def predict(self, request: int, depth: int) -> float:
        known = self._acceptance._known
        factor = factor_of(known.requests[0, request], known.all_trials[0])
        return float(with_factor(known.acceptance_rates[0, depth], factor))

    def learn(self, step: Trials) -> None:
        forest = columns.proposals(step.lengths.tolist())
        if len(forest):
            accepted = columns.kept(forest, step.accepted.tolist())
            tried = columns.kept(forest, (step.accepted + 1).tolist())
            self._acceptance.observe(columns.batch(REQUESTS), forest, tried, accepted, tried)


@dataclass(frozen=True, slots=True)
class Variances:
    """Variances of log-odds."""

    request: float
    """Variance of new requests' offsets."""
    rate_drift: float
    """Growth of a depth's rate's variance at each step."""
    offset_drift: float
    """Growth of an offset's variance at each step."""


GRID = [Variances(*choice) for choice in itertools.product((0.15, 0.3, 0.6), (1e-4, 5e-4, 2e-3), (0.0, 2e-3, 1e-2))]
RATE_VARIANCE = 1.0  # of a rate before any trial


class OffsetEstimator:
    """Moves rate b and offset t, of variance V each, by a trial's outcome y. p is the prediction, w = p (1 - p):

    S = 1 + w (V_b + V_t),  b += V_b (y - p) / S,  t += V_t (y - p) / S,  V -= V^2 w / S
    """

    def __init__(self, variances: Variances) -> None:
        self._variances = variances
        self._rates, self._rate_variances = np.full(DEPTHS, math.log(PRIOR / (1 - PRIOR))), np.full(DEPTHS, 1.0)
        self._offsets, self._offset_variances = np.zeros(REQUESTS), np.full(REQUESTS, variances.request)

    def begin(self, requests: Ints) -> None:
        self._rate_variances = np.minimum(RATE_VARIANCE, self._rate_variances + self._variances.rate_drift)
        grown = self._offset_variances + self._variances.offset_drift
        self._offset_variances = np.minimum(self._variances.request, grown)
        self._offsets[requests], self._offset_variances[requests] = 0.0, self._variances.request

    def predict(self, request: int, depth: int) -> float:
        """Return the mean over both Gaussians, in the usual approximation of a logistic normal."""
        variance = self._rate_variances[depth] + self._offset_variances[request]
        return _logistic(self._log_odds(request, depth) / math.sqrt(1.0 + math.pi / 8.0 * variance))

    def learn(self, step: Trials) -> None:
        rates, offsets = self._rate_variances, self._offset_variances
        for request, depth, accepted in step.pairs():
            chance = _logistic(self._log_odds(request, depth))
            weight, residual = chance * (1.0 - chance), accepted - chance
            spread = 1.0 + weight * (rates[depth] + offsets[request])
            self._rates[depth] += rates[depth] * residual / spread
            self._offsets[request] += offsets[request] * residual / spread
            rates[depth] -= rates[depth] ** 2 * weight / spread
            offsets[request] -= offsets[request] ** 2 * weight / spread

    def _log_odds(self, request: int, depth: int) -> float:
        return float(self._rates[depth] + self._offsets[request])


def _logistic(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds))


def steps(recording: Recording, drafter: str, answers: Sequence[int]) -> Iterator[Trials]:
    """Yield the steps of `REQUESTS` requests at a time, until an answer would be missing."""
    column, waiting = recording.drafters.index(drafter), list(answers)
    places = np.zeros((REQUESTS, 2), np.int64)  # position of each request, and the end of its answer
    new = np.arange(REQUESTS)
    while len(waiting) >= len(new):
        for request in new.tolist():
            answer = waiting.pop()
            places[request] = recording.start[answer], recording.start[answer + 1]
        at, end = places.T
        lengths = np.minimum(np.minimum(DEPTHS, recording.proposed[column, at]), np.maximum(0, end - at - 1))
        accepted = np.minimum(lengths, recording.depth[column, at])
        yield Trials(new, lengths.astype(np.int64), accepted.astype(np.int64))
        places[:, 0] += 1 + accepted
        new = np.flatnonzero(places[:, 0] >= places[:, 1])


@dataclass(frozen=True, slots=True)
class Score:
    log_loss: float
    calibration_error: float


def score(estimator: Estimator, load: Sequence[Trials]) -> Score:
    predicted, outcomes = list[float](), list[bool]()
    for step in load:
        estimator.begin(step.new)
        for request, depth, accepted in step.pairs():
            predicted.append(estimator.predict(request, depth))
            outcomes.append(accepted)
        estimator.learn(step)
    chances, happened = np.clip(predicted, LEAST_CHANCE, 1.0 - LEAST_CHANCE), np.array(outcomes)
    loss = float(-np.log(np.where(happened, chances, 1.0 - chances)).mean())
    return Score(loss, _calibration_error(chances, happened))


def _calibration_error(chances: Floats, happened: np.ndarray) -> float:
    bins = np.minimum((chances * BINS).astype(int), BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    distance = np.abs(np.bincount(bins, chances, BINS) - np.bincount(bins, happened, BINS))
    return float(distance.sum() / count.sum())


def drafters() -> dict[str, tuple[Recording, str]]:
    recorded, block = load_shipped(), load_shipped_with_block_head()
    return {
        "prompt lookup": (recorded, "lookup"),
        "draft model": (recorded, "draft"),
        "EAGLE-3 head": (recorded, "eagle"),
        "EAGLE-3 head, lifted to 0.7": (lift(recorded, 0.7, 1), "eagle"),
        "draft model, lifted to 0.9": (lift(recorded, 0.9, 1), "draft"),
        "block head": (block, "block"),
    }


def halves(recording: Recording, seed: int) -> tuple[Sequence[int], Sequence[int]]:
    answers = np.random.default_rng([seed, 31]).permutation(recording.answers).tolist()
    return answers[: len(answers) // 2], answers[len(answers) // 2 :]


def fit_variances(loads: Sequence[Sequence[Trials]]) -> Variances:
    """Return the variances of the lowest mean log loss over the loads."""
    return min(GRID, key=lambda variances: sum(score(OffsetEstimator(variances), load).log_loss for load in loads))


def main() -> None:
    rows: dict[str, dict[str, list[Score]]] = {name: {"counts": [], "offset": []} for name in drafters()}
    for seed in range(SEEDS):
        parts = {name: halves(recording, seed) for name, (recording, _) in drafters().items()}
        loads = {
            name: [list(steps(recording, drafter, part)) for part in parts[name]]
            for name, (recording, drafter) in drafters().items()
        }
        variances = fit_variances([fit for fit, _ in loads.values()])
        for name, (_, held_out) in loads.items():
            rows[name]["counts"].append(score(CountsEstimator(), held_out))
            rows[name]["offset"].append(score(OffsetEstimator(variances), held_out))
    print("\n".join(table(rows)))
    made = {
        name: {kind: [asdict(result) for result in scores] for kind, scores in row.items()}
        for name, row in rows.items()
    }
    RESULTS.write_text(json.dumps({"seeds": SEEDS, "drafters": made}, indent=1) + "\n")


def table(rows: dict[str, dict[str, list[Score]]]) -> Iterator[str]:
    yield "| drafter | log loss, counts | offset | offset - counts, by seed | calibration error, counts | offset |"
    yield "|---|---|---|---|---|---|"
    for name, row in rows.items():
        losses, errors = ({kind: [getattr(result, field) for result in scores] for kind, scores in row.items()}
                          for field in ("log_loss", "calibration_error"))  # fmt: skip
        more = np.subtract(losses["offset"], losses["counts"])
        means = [f"{np.mean(values[kind]):.4f}" for values in (losses, errors) for kind in ("counts", "offset")]
        yield f"| {name} | {means[0]} | {means[1]} | {more.min():+.4f} to {more.max():+.4f} | {means[2]} | {means[3]} |"


if __name__ == "__main__":
    main()
