"""vLLM 0.32's adaptive verification: `vllm/v1/worker/gpu/spec_decode/adaptive_verification.py` in numpy.

K tokens are drafted for every request at every step. The host chooses how many are verified in all: the argmax of
estimated tokens / cost, by the confidences of the step before. The device chooses which ones, by this step's. A
confidence is the acceptance that `acceptance_estimator.py` predicts from the drafter's log-odds, calibrated while
serving. Shapes: N requests, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.workload import Floats, Ints
from outrider_runtime.simulate.worlds.world import Pass, World

START_SLOPE, START_INTERCEPT = 0.5, -0.2
"""Coefficients before the first fit: vLLM's medians over five models."""
MOST_LOG_ODDS = 40.0
REFIT_STEPS = 100
DAMPING_OBSERVATIONS = 50.0
RIDGE = 1e-3

Curve = Sequence[tuple[int, float]]
"""(size, milliseconds), in ascending order of size."""


class AcceptanceEstimator:
    """P(accepted) = sigmoid(slope * log-odds + intercept of its depth), fitted by damped Newton steps."""

    def __init__(self, slots: int, k: int, refit_steps: int = REFIT_STEPS) -> None:
        self._refit_steps = refit_steps
        self.slope, self.intercepts = START_SLOPE, np.full(k, START_INTERCEPT)
        self._features, self._predictions = np.zeros((slots, k)), np.zeros((slots, k))
        self._information, self._gradient, self._counts = np.zeros((k, 3)), np.zeros((k, 2)), np.zeros(k)
        self._steps = 0

    def predict(self, slots: Ints, log_odds: Floats) -> Floats:
        """Return the acceptance (N, K) of the tokens that were just drafted. log_odds: (N, K)"""
        features = np.clip(log_odds, -MOST_LOG_ODDS, MOST_LOG_ODDS)
        chances = _sigmoid(self.slope * features + self.intercepts)
        self._features[slots], self._predictions[slots] = features, chances
        return chances

    def observe(self, slots: Ints, accepted: Ints, verified: Ints) -> None:
        """Learn from a step's verdicts: accepted tokens and the first rejected one are trials."""
        depth = np.arange(len(self.intercepts))
        tried = (depth <= accepted[:, None]) & (depth < verified[:, None])
        x, p = self._features[slots], self._predictions[slots]
        weight = np.where(tried, p * (1 - p), 0.0)
        residual = np.where(tried, (depth < accepted[:, None]) - p, 0.0)
        self._information += np.stack([(weight * x * x).sum(0), (weight * x).sum(0), weight.sum(0)], axis=1)
        self._gradient += np.stack([(residual * x).sum(0), residual.sum(0)], axis=1)
        self._counts += tried.sum(0)
        self._steps += 1
        if self._steps == self._refit_steps:
            self._refit()

    def _refit(self) -> None:
        """Make one Newton step for the shared slope and each depth's intercept, damped by the number of trials."""
        (a, b, c), (slopes, intercepts) = self._information.T, self._gradient.T
        c = c + RIDGE
        step = (slopes.sum() - (b * intercepts / c).sum()) / (a.sum() + RIDGE - (b * b / c).sum())
        step *= self._counts.sum() / (self._counts.sum() + DAMPING_OBSERVATIONS)
        step = step if np.isfinite(step) and self.slope + step >= 0 else 0.0
        self.slope += step
        shifts = (intercepts - b * step) / c * (self._counts / (self._counts + DAMPING_OBSERVATIONS))
        self.intercepts = self.intercepts + np.nan_to_num(shifts)
        self._information[:], self._gradient[:], self._counts[:], self._steps = 0.0, 0.0, 0.0, 0


@dataclass(frozen=True, slots=True, eq=False)
class CostTables:
    """Times in milliseconds."""

    draft: Floats
    """Time of drafting, by requests."""
    verify: Floats
    """Time of the target's pass, by tokens."""


class AdaptiveVerification:
    """The worker's state, by slot."""

    def __init__(self, slots: int, k: int, costs: CostTables) -> None:
        self._costs = costs
        self._estimator = AcceptanceEstimator(slots, k)
        self._confidences = np.ones((slots, k))
        self._stale = np.ones((slots, k))
        """Confidences of the step before, which reached the host in time."""

    def add(self, slots: Ints) -> None:
        """Reset the slots of new requests."""
        self._confidences[slots] = self._stale[slots] = 1.0

    def keep(self, slots: Ints, others: Ints, scheduled: Ints, sampling: int) -> Ints:
        """Return the draft tokens (N,) to verify. others, scheduled: (N,) further tokens of the step, and draft tokens.
        sampling: requests that get a token."""
        scores = survivals(self._stale[slots], scheduled)
        most = budget(np.sort(scores[scores >= 0])[::-1], int(others.sum()), len(slots), sampling, self._costs)
        return assign(self._confidences[slots], scheduled, most)

    def step(self, slots: Ints, accepted: Ints, verified: Ints, log_odds: Floats) -> None:
        """Take in the target's verdicts (N,), then the drafter's log-odds (N, K) for the next step."""
        self._estimator.observe(slots, accepted, verified)
        self._stale[:] = self._confidences
        self._confidences[slots] = self._estimator.predict(slots, log_odds)


def survivals(confidences: Floats, scheduled: Ints) -> Floats:
    """Return the running products (N, K); -1 beyond the scheduled draft tokens."""
    beyond = np.arange(confidences.shape[1]) >= scheduled[:, None]
    return np.where(beyond, -1.0, confidences.cumprod(1))


def budget(scores: Floats, others: int, requests: int, sampling: int, costs: CostTables) -> int:
    """Return the draft tokens to verify in all: argmax of (sampling + the best scores) / (drafting + verifying)."""
    tokens = sampling + np.concatenate(([0.0], np.cumsum(scores)))
    verify = costs.verify[others : others + len(tokens)]
    return int(np.argmax(tokens[: len(verify)] / (costs.draft[requests] + verify)))


def assign(confidences: Floats, scheduled: Ints, most: int) -> Ints:
    """Return (N,): how many of each request's draft tokens are among the `most` likeliest to be accepted."""
    scores = survivals(confidences, scheduled)
    best = np.argsort(-scores, axis=None, kind="stable")[: min(most, int(scheduled.sum()))]
    return np.bincount(best // scores.shape[1], minlength=len(scheduled)).astype(np.int64)


class Adaptive(Fixed):
    """Drafts K tokens for every request; the device keeps what `on_device` says."""

    def __init__(self, drafters: Sequence[Drafter], drafter: int, k: int, costs: CostTables, slots: int) -> None:
        super().__init__(drafters, drafter, k)
        self.on_device = AdaptiveVerification(slots, k, costs)

    def release(self, slots: Ints) -> None:
        self.on_device.add(slots)


CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
BEYOND = (768, 1024, 2048, 4096, 8192)
PROFILE_CONTEXT = 8192
"""vLLM's default, VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN."""


def cost_tables(world: World, drafter: str, k: int, requests: int) -> CostTables:
    """Tables from the world's own times, at the sizes that vLLM profiles."""
    verify = [(size, _verify_ms(world, size, k)) for size in (*CAPTURED, *BEYOND)]
    draft = [(n, _draft_ms(world, drafter, n, k)) for n in range(1, requests + 1)]
    return CostTables(table(requests, draft, CAPTURED[-1]), table(BEYOND[-1], verify, CAPTURED[-1]))


def table(limit: int, curve: Curve, graph_tokens: int) -> Floats:
    """Return (limit + 1,): a staircase up to the largest graph, linear between the sizes beyond it."""
    sizes, ms = np.array(curve, float).T
    ms = np.maximum.accumulate(ms)
    values = np.arange(limit + 1)
    rows = ms[np.minimum(np.searchsorted(sizes, values), len(sizes) - 1)]
    smooth, above = values > graph_tokens, sizes > graph_tokens
    if graph_tokens and smooth.any() and above.any():
        rows[smooth] = np.interp(values[smooth], sizes[above], ms[above])
    after = values > sizes[-1]
    if len(sizes) > 1:
        rows[after] = ms[-1] + (ms[-1] - ms[-2]) / (sizes[-1] - sizes[-2]) * (values[after] - sizes[-1])
    return np.asarray(np.maximum(rows, 1e-6))


def _verify_ms(world: World, tokens: int, k: int) -> float:
    requests = max(1, -(-tokens // (1 + k)))
    return 1e3 * world.target_s(Pass(tokens, requests, PROFILE_CONTEXT, tokens))


def _draft_ms(world: World, drafter: str, requests: int, k: int) -> float:
    return 1e3 * world.draft_s(drafter, Pass(requests * (1 + k), requests, PROFILE_CONTEXT, requests), k)


def _sigmoid(x: Floats) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-x)), np.float64)
