"""Chooses the steps to measure: a grid over batch, context, verification length and prefill, most informative first.

The order is a greedy D-optimal design: each next shape adds the most information about the coefficients per second of
measuring, given those before it. A smaller time budget measures a shorter prefix of the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONTEXTS = (64, 512, 2048, 8192, 32768)
"""Context tokens of a request, a factor of four to eight apart."""
LONG_CONTEXT_FACTOR = 2
"""The model's longest context is measured, too, if it is at least so many times the longest of `CONTEXTS` that fits."""
PREFILLS = (64, 256, 1024)
"""Prompt tokens of a step."""
HEADROOM_TOKENS = 160
"""Tokens that a request may grow by while its shapes are measured."""
SMALL_BATCH = 8
"""Requests of a batch that is measured whatever the budget is."""
KNEE_GUESSES = (16, 64)
"""Batched tokens at which the knee may lie. The design needs shapes on both sides of it before any is measured."""
HELD_OUT_EVERY = 4
"""One shape of so many is held out from the fit."""
MIN_SHAPES = 8
"""Shapes that a fit with a held-out error needs."""


@dataclass(frozen=True, slots=True, order=True)
class GridPoint:
    """The intended shape of one engine step. A measured step reports the shape that it really had."""

    context: int
    """Cached tokens of each decoding request."""
    batch: int
    """Number of decoding requests."""
    verify: int = 0
    """Draft tokens that each decoding request verifies."""
    uneven: bool = False
    """Whether only every other request verifies them, which makes a varlen step without a prefill."""
    prefill: int = 0
    """Prompt tokens of one more request in the same step."""
    width: int = 1
    """Nodes at each depth of the trees that the drafter proposes at the step's end; 1: chains."""

    @property
    def is_varlen(self) -> bool:
        """Whether the step's requests have different lengths."""
        return self.uneven or self.prefill > 0

    @property
    def batched(self) -> int:
        """Batched tokens of the step."""
        verifying = (self.batch + 1) // 2 if self.uneven else self.batch
        return self.batch + verifying * self.verify + self.prefill

    def __str__(self) -> str:
        text = f"batch {self.batch:>3}  context {self.context:>5}  verify {self.verify}"
        text += " (every other)" if self.uneven else ""
        text += f"  width {self.width}" if self.width > 1 else ""
        return text + (f"  prefill {self.prefill}" if self.prefill else "")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """EngineLimits of the engine."""

    max_requests: int
    """Most requests of a step."""
    max_model_len: int
    """Most tokens of a request."""
    max_draft_tokens: int
    """Largest draft length; 0 without speculation."""
    step_tokens: int
    """Most batched tokens of a step."""
    kv_tokens: int
    """Tokens that fit into the KV cache."""


@dataclass(frozen=True, slots=True)
class StepPace:
    """Rough step times on this machine, measured with a few steps before the grid is chosen."""

    step_s: float
    """Seconds of the shortest step."""
    token_s: float
    """Seconds per further token of a decoding request. It is small: every step reads all weights anyway."""
    prompt_token_s: float
    """Seconds per prompt token."""

    def seconds(self, point: GridPoint) -> float:
        """Return the estimated time of a step of this shape."""
        decode_s = self.token_s * (point.batched - point.prefill)
        return self.step_s + decode_s + self.prompt_token_s * point.prefill

    def times(self, factor: float) -> StepPace:
        return StepPace(factor * self.step_s, factor * self.token_s, factor * self.prompt_token_s)


def target_grid(limits: EngineLimits) -> list[GridPoint]:
    """Return every shape that may be worth measuring for the target."""
    points: list[GridPoint] = []
    for context in contexts(limits):
        for batch in batches(limits, context):
            points += [GridPoint(context, batch, verify) for verify in lengths(limits)]
            points += _varlen_points(limits, context, batch)
    return [p for p in points if p.batched <= limits.step_tokens]


def feeding_grid(limits: EngineLimits) -> list[GridPoint]:
    """Return every shape that may be worth measuring for the feeding of a block drafter, which proposes nothing then:
    it depends on the step's tokens alone."""
    context = contexts(limits)[0]
    points: list[GridPoint] = []
    for batch in batches(limits, context):
        points += [GridPoint(context, batch, prefill=tokens) for tokens in (0, *prefills(limits, batch))]
    return [p for p in points if p.batched <= limits.step_tokens]


def drafter_grid(limits: EngineLimits, *, reads: bool, widest: int = 1) -> list[GridPoint]:
    """Return every shape that may be worth measuring for a drafter: its cost depends on passes and their sizes only.

    reads: the drafter's first pass runs over the tokens of the target's step, prompts included.
    widest: most nodes at a depth of the drafter's trees; its later passes run over that many tokens per request.
    """
    ends = {1, max(1, limits.max_draft_tokens)}
    points: list[GridPoint] = []
    for context in contexts(limits):
        for batch in batches(limits, context):
            points += [GridPoint(context, batch, verify) for verify in sorted(ends)]
            points += [GridPoint(context, batch, max(ends), width=width) for width in widths(widest)]
            if reads:
                points += [GridPoint(context, batch, 1, prefill=tokens) for tokens in prefills(limits, batch)[:2]]
    return [p for p in points if p.batched <= limits.step_tokens]


def contexts(limits: EngineLimits) -> list[int]:
    """Return the contexts to measure, in tokens.

    The longest possible context is added if the others end far below it. There a step mostly reads KV, and no line
    through short contexts predicts how long that takes.
    """
    longest = limits.max_model_len - HEADROOM_TOKENS
    fitting = [context for context in CONTEXTS if context <= longest]
    if fitting and longest >= LONG_CONTEXT_FACTOR * fitting[-1]:
        fitting.append(longest)
    return fitting or [max(1, limits.max_model_len // 2)]


def batches(limits: EngineLimits, context: int) -> list[int]:
    """Return the batch sizes to measure: powers of two that fit into the KV cache."""
    most = min(limits.max_requests, limits.kv_tokens // (context + HEADROOM_TOKENS))
    return [1 << power for power in range(12) if 1 << power <= max(1, most)]


def lengths(limits: EngineLimits) -> list[int]:
    """Return the verification lengths to measure: 0, 1, half and all. The batch sizes, not these, show the knee."""
    most = limits.max_draft_tokens
    return sorted({0, min(1, most), (most + 1) // 2, most})


def widths(widest: int) -> list[int]:
    """Return the tree widths to measure: the widest and one in between, which suffices for a straight line."""
    return sorted({round(widest**0.5), widest} - {0, 1})


def prefills(limits: EngineLimits, batch: int) -> list[int]:
    """Return the prompt lengths to measure together with `batch` decoding requests. A prompt is one more request."""
    longest = limits.max_model_len - HEADROOM_TOKENS // 4
    return [tokens for tokens in PREFILLS if tokens <= longest and batch < limits.max_requests]


def _varlen_points(limits: EngineLimits, context: int, batch: int) -> list[GridPoint]:
    most = limits.max_draft_tokens
    points = [GridPoint(context, batch, 0, prefill=tokens) for tokens in prefills(limits, batch)]
    if most and batch > 1:
        points.append(GridPoint(context, batch, most, uneven=True))
        points += [GridPoint(context, batch, most, prefill=tokens) for tokens in prefills(limits, batch)[:1]]
    return points


def select_affordable(points: Iterable[GridPoint], pace: StepPace, budget_s: float) -> list[GridPoint]:
    """Return the points that fit the budget: a step takes at most 1/300 of it, the prefill of a batch at most 1/20.

    Small batches with the shortest context are always kept: a pace that was measured at a bad moment must not leave a
    grid that is too small to fit.
    """
    points = list(points)
    shortest = min((point.context for point in points), default=0)

    def is_small(point: GridPoint) -> bool:
        return point.batch <= SMALL_BATCH and point.context == shortest and not point.prefill

    def is_affordable(point: GridPoint) -> bool:
        set_up_s = point.batch * point.context * pace.prompt_token_s
        return pace.seconds(point) <= budget_s / 300 and set_up_s <= budget_s / 20

    return [point for point in points if is_small(point) or is_affordable(point)]


def most_informative(points: Sequence[GridPoint], pace: StepPace, *, passes: bool = False) -> list[GridPoint]:
    """Return `points` in the order of a greedy D-optimal design, weighted by the time that each takes to measure.

    passes: for an autoregressive drafter, whose first and later passes have separate coefficients.
    """
    if not points:
        return []
    terms = _pass_features if passes else _features
    features = np.array([terms(point) / pace.seconds(point) for point in points])  # (shapes, coefficients)
    features /= np.maximum(np.abs(features).max(axis=0), 1e-12)
    cost = np.array([pace.step_s + pace.seconds(point) for point in points])
    inverse = np.eye(features.shape[1]) * 1e3  # a weak prior
    left = list(range(len(points)))
    order: list[GridPoint] = []
    while left:
        rows = features[left]
        gain = np.log1p(np.einsum("ij,jk,ik->i", rows, inverse, rows))  # log-determinant that each shape adds
        best = left.pop(int((gain / np.sqrt(cost[left])).argmax()))
        order.append(points[best])
        step = inverse @ features[best]
        inverse -= np.outer(step, step) / (1.0 + features[best] @ step)
    return order


def held_out(order: Sequence[GridPoint]) -> frozenset[GridPoint]:
    """Return the shapes to hold out, spread over the design. Its first shapes span the model and stay in the fit."""
    return frozenset(order[MIN_SHAPES - 2 :: HELD_OUT_EVERY])


def order_round(points: Iterable[GridPoint]) -> list[GridPoint]:
    """Return the points in the order of a round: batches of one context grow, so that a request is prefilled once."""
    return sorted(points, key=lambda p: (p.context, p.batch, p.prefill, p.verify))


def _features(point: GridPoint) -> NDArray[np.float64]:
    """Return the terms of the latency model at `point`, with the tokens above each possible knee."""
    context = point.batch * point.context
    query = point.batched - point.prefill
    above = [max(0.0, point.batched - knee) for knee in KNEE_GUESSES]
    return np.array([1.0, point.batch, point.batched, query, context, point.context * query / 1000, *above])


def _pass_features(point: GridPoint) -> NDArray[np.float64]:
    """Return the terms of a drafter's cost at `point`: those of its first pass, and those of all later passes."""
    later = max(0, point.verify - 1)
    context = point.batch * point.context
    nodes = later * point.batch * point.width
    return np.array([1.0, point.batched, point.batch, later, nodes, context, later * context])
