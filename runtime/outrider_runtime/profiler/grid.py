"""Which steps to measure: a grid over batch, context, verification length and prefill, the best first.

The order is a greedy D-optimal design: each next shape is the one that tells most about the coefficients, given
those before it, for the time it takes. A smaller time budget measures a shorter prefix of the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONTEXTS = (64, 512, 2048, 8192, 32768)
FAR = 2
"""Times the longest of these, from which on the longest request is measured, too."""
PREFILLS = (64, 256, 1024)
HEADROOM_TOKENS = 160
"""Tokens that a request may grow by while its shapes are measured."""
SMALL_BATCH = 8
KNEE_GUESSES = (16, 64)
"""Where a bend is looked for before anything is measured: the design must see both sides of it."""
HELD_OUT_EVERY = 4
LEAST_SHAPES = 8
"""Below this a fit with a held-out error means nothing."""


@dataclass(frozen=True, slots=True, order=True)
class GridPoint:
    """The shape of one engine step, as asked for; the measured step says what it came to."""

    context: int
    """Cached tokens of each decoding request."""
    batch: int
    """Decoding requests."""
    verify: int = 0
    """Proposed tokens that each of them verifies."""
    uneven: bool = False
    """Only every other request verifies them: the ragged execution mode without a prefill."""
    prefill: int = 0
    """Prompt tokens that one more request computes in the same step."""
    width: int = 1
    """Nodes at each depth of the trees that the drafter proposes at the step's end; 1: chains."""

    @property
    def ragged(self) -> bool:
        return self.uneven or self.prefill > 0

    @property
    def batched(self) -> int:
        verifying = (self.batch + 1) // 2 if self.uneven else self.batch
        return self.batch + verifying * self.verify + self.prefill

    def __str__(self) -> str:
        text = f"batch {self.batch:>3}  context {self.context:>5}  verify {self.verify}"
        text += " (every other)" if self.uneven else ""
        text += f"  width {self.width}" if self.width > 1 else ""
        return text + (f"  prefill {self.prefill}" if self.prefill else "")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can run, and what the budget lets it."""

    max_requests: int
    max_model_len: int
    max_draft_tokens: int
    step_tokens: int
    """Batched tokens of one step at most."""
    kv_tokens: int
    """Tokens that fit into the KV cache."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What a step roughly costs here, from a few steps before the grid is drawn."""

    step_s: float
    """The shortest step."""
    token_s: float
    """Each further token of a decoding request."""
    prompt_token_s: float
    """Each token of a prompt. A short step reads the weights whatever it holds, so there the others are nearly free; a
    prompt's are not."""

    def seconds(self, point: GridPoint) -> float:
        decoded_s = self.token_s * (point.batched - point.prefill)
        return self.step_s + decoded_s + self.prompt_token_s * point.prefill

    def times(self, factor: float) -> Pace:
        return Pace(factor * self.step_s, factor * self.token_s, factor * self.prompt_token_s)


def target_grid(limits: Limits) -> list[GridPoint]:
    """Every shape that could be worth measuring for the target."""
    points: list[GridPoint] = []
    for context in contexts(limits):
        for batch in batches(limits, context):
            points += [GridPoint(context, batch, verify) for verify in lengths(limits)]
            points += _ragged(limits, context, batch)
    return [p for p in points if p.batched <= limits.step_tokens]


def drafter_grid(limits: Limits, *, reads: bool, widest: int = 1) -> list[GridPoint]:
    """Shapes for one drafter's own cost: it has no verification lengths to explore, only passes and their sizes.

    reads: its first pass runs over the tokens of the target's step, prompts among them. widest: nodes at a depth of its
    trees at most, so that its later passes run over width times as many tokens as there are requests.
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


def contexts(limits: Limits) -> list[int]:
    """The longest is what a request may take, where the others end far below: reading its KV is then what a step takes,
    and no line from short contexts says how long."""
    longest = limits.max_model_len - HEADROOM_TOKENS
    fitting = [context for context in CONTEXTS if context <= longest]
    if fitting and longest >= FAR * fitting[-1]:
        fitting.append(longest)
    return fitting or [max(1, limits.max_model_len // 2)]


def batches(limits: Limits, context: int) -> list[int]:
    most = min(limits.max_requests, limits.kv_tokens // (context + HEADROOM_TOKENS))
    return [1 << power for power in range(12) if 1 << power <= max(1, most)]


def lengths(limits: Limits) -> list[int]:
    """0, 1, about half, and the most: a straight line needs no more, and a bend shows in the batch sizes."""
    most = limits.max_draft_tokens
    return sorted({0, min(1, most), (most + 1) // 2, most})


def widths(widest: int) -> list[int]:
    """Of beams, a chain aside: the widest, and one between: a straight line needs no more."""
    return sorted({round(widest**0.5), widest} - {0, 1})


def prefills(limits: Limits, batch: int) -> list[int]:
    """Lengths of a prompt that may run beside `batch` decoding requests; it needs a place in the batch as well."""
    longest = limits.max_model_len - HEADROOM_TOKENS // 4
    return [tokens for tokens in PREFILLS if tokens <= longest and batch < limits.max_requests]


def _ragged(limits: Limits, context: int, batch: int) -> list[GridPoint]:
    most = limits.max_draft_tokens
    points = [GridPoint(context, batch, 0, prefill=tokens) for tokens in prefills(limits, batch)]
    if most and batch > 1:
        points.append(GridPoint(context, batch, most, uneven=True))
        points += [GridPoint(context, batch, most, prefill=tokens) for tokens in prefills(limits, batch)[:1]]
    return points


def within(points: Iterable[GridPoint], pace: Pace, budget_s: float) -> list[GridPoint]:
    """Those that the budget can pay for: no step over 1/300 of it, no set-up of a batch over 1/20.

    Small batches stay whatever the budget: a pace taken in a bad moment must not leave a grid without extent.
    """
    points = list(points)
    shortest = min((point.context for point in points), default=0)

    def small(point: GridPoint) -> bool:
        return point.batch <= SMALL_BATCH and point.context == shortest and not point.prefill

    def payable(point: GridPoint) -> bool:
        set_up_s = point.batch * point.context * pace.prompt_token_s
        return pace.seconds(point) <= budget_s / 300 and set_up_s <= budget_s / 20

    return [point for point in points if small(point) or payable(point)]


def most_informative(points: Sequence[GridPoint], pace: Pace, *, passes: bool = False) -> list[GridPoint]:
    """`points` in the order of a greedy D-optimal design, weighted by what each costs to measure.

    `passes`: for an autoregressive drafter, whose first pass and later ones have to be told apart.
    """
    if not points:
        return []
    terms = _pass_features if passes else _features
    features = np.array([terms(point) / pace.seconds(point) for point in points])  # (shapes, coefficients)
    features /= np.maximum(np.abs(features).max(axis=0), 1e-12)
    cost = np.array([pace.step_s + pace.seconds(point) for point in points])
    inverse = np.eye(features.shape[1]) * 1e3  # prior: next to nothing is known
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
    """Shapes kept from the fit, spread over the design; the first ones, which span it, stay in."""
    return frozenset(order[LEAST_SHAPES - 2 :: HELD_OUT_EVERY])


def interleaved(points: Iterable[GridPoint]) -> list[GridPoint]:
    """One round's order: batches of one context grow step by step, so that each request is prefilled once."""
    return sorted(points, key=lambda p: (p.context, p.batch, p.prefill, p.verify))


def _features(point: GridPoint) -> NDArray[np.float64]:
    """Terms of the latency model at `point`, with both sides of every guessed knee."""
    context = point.batch * point.context
    query = point.batched - point.prefill
    above = [max(0.0, point.batched - knee) for knee in KNEE_GUESSES]
    return np.array([1.0, point.batch, point.batched, query, context, point.context * query / 1000, *above])


def _pass_features(point: GridPoint) -> NDArray[np.float64]:
    """Terms of a drafter's cost at `point`: of its first pass, and of all the others together."""
    later = max(0, point.verify - 1)
    context = point.batch * point.context
    nodes = later * point.batch * point.width
    return np.array([1.0, point.batched, point.batch, later, nodes, context, later * context])
