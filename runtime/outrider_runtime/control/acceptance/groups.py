"""What sets a class, or a request, apart from what is known of all: one factor each on the odds of acceptance.

It multiplies odds, so nothing passes 1, and is shrunk to 1. A request's factor explains what its class's leaves.
Shapes: G groups: no class, classes, slots.
"""

from __future__ import annotations

import numpy as np

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import Floats

CLASS_TRIALS, SLOT_TRIALS = 30.0, 6.0
MOST_TRIALS, MOST_SLOT_TRIALS = 150.0, 60.0
"""Most trials an estimate rests on, so that it follows the traffic."""
LEAST, MOST = 0.01, 0.99
TRIALS, TAKEN, EXPECTED, EXPECTED_ANY, EVERY = range(5)
"""Of a group: trials, acceptances, and the acceptances that the pool's estimate expects, with and without regard to
confidence, all four of the last trials only; and all trials."""


@compiled
def with_factor(chance: float, factor: float) -> float:
    """A probability with its odds multiplied."""
    odds = chance / (1.0 - chance) * factor
    return float(min(odds / (1.0 + odds), MOST))


@compiled
def pool_tried(groups: Floats, classes: int) -> float:
    """All trials: each is of a class, or of none. groups: (G, 5) of a drafter"""
    total = 0.0
    for row in range(1 + classes):
        total += groups[row, EVERY]
    return total


@compiled
def weight_of(pool: float, group: Floats, strength: float) -> float:
    """How much a group's own acceptances count against what the pool expects of it. Its share of the pool is evidence
    that has counted already: its mean is shrunk to that of the others, and of a lone request's nothing is left."""
    if group[TRIALS] <= 0.0:
        return 0.0
    share = min(0.999, group[EVERY] / max(pool, 1e-9))
    return float(max(0.0, group[TRIALS] - strength * share / (1.0 - share)) / (group[TRIALS] + strength))


@compiled
def ratio(group: Floats, weight: float, column: int) -> float:
    """By what the odds of a group differ from what the pool expects, EXPECTED or EXPECTED_ANY."""
    if weight <= 0.0:
        return 1.0
    mean = min(max(group[column] / group[TRIALS], LEAST), MOST)
    own = min(max(mean + weight * (group[TAKEN] / group[TRIALS] - mean), LEAST), MOST)
    return float(own * (1.0 - mean) / ((1.0 - own) * mean))


@compiled
def class_factors(pool: float, groups: Floats, classes: int, column: int) -> Floats:
    """(1 + classes,): the factors that requests of a class have in common, the first one those of none. groups: (G, 5)
    of a drafter."""
    factors = np.empty(1 + classes)
    for row in range(1 + classes):
        factors[row] = ratio(groups[row], weight_of(pool, groups[row], CLASS_TRIALS), column)
    return factors


@compiled
def factor_of(of_class: Floats, pool: float, groups: Floats, slo_class: int, slot: int, column: int) -> float:
    """The product of both factors on a request's odds. of_class: as `class_factors` has them."""
    own = groups[len(of_class) + slot]
    in_common = of_class[min(slo_class, len(of_class) - 2) + 1]
    return float(in_common * ratio(own, weight_of(pool, own, SLOT_TRIALS), column))


@compiled
def count_trial(
    groups: Floats, pool: float, rows: tuple[int, int], binned: float, blind: float, accepted: bool
) -> None:
    """Of one trial; the slot's factor explains what the class's leaves. groups: (G, 5) of its drafter; rows: its class,
    its slot; binned, blind: what the pool expects with and without its confidence."""
    for j in range(2):
        group, strength = groups[rows[j]], (CLASS_TRIALS, SLOT_TRIALS)[j]
        group[:EVERY] *= min(1.0, (MOST_TRIALS, MOST_SLOT_TRIALS)[j] / (group[TRIALS] + 1.0))
        weight = weight_of(pool, group, strength)
        by_bin, by_any = ratio(group, weight, EXPECTED), ratio(group, weight, EXPECTED_ANY)
        group[TRIALS] += 1.0
        group[TAKEN] += accepted
        group[EXPECTED] += binned
        group[EXPECTED_ANY] += blind
        group[EVERY] += 1.0
        binned, blind = with_factor(binned, by_bin), with_factor(blind, by_any)
