"""How a class, or a request, differs from all requests: each has a factor on the odds of acceptance.

A factor multiplies odds, so that no probability exceeds 1, and is shrunk to 1. A request's factor is fitted to what its
class's factor leaves unexplained. Shapes: G groups: one for requests without a class, one for each class, one for each
slot.
"""

from __future__ import annotations

import numpy as np

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import Floats

CLASS_TRIALS, SLOT_TRIALS = 30.0, 6.0
"""Strength of the shrinkage to 1: trials that a factor of 1 counts for, for a class and for a request."""
MOST_TRIALS, MOST_SLOT_TRIALS = 150.0, 60.0
"""Most trials that an estimate rests on, so that it follows the traffic."""
LEAST, MOST = 0.01, 0.99
"""Bounds of every probability."""
RECENT_TRIALS, RECENT_ACCEPTED, EXPECTED_BINNED, EXPECTED_UNBINNED, TOTAL_TRIALS = range(5)
"""Columns of a group's counts: recent trials; how many of them were accepted; how many of them the pool's estimate
expected to be accepted, with and without regard to confidence; and all trials."""


@compiled
def with_factor(chance: float, factor: float) -> float:
    """The probability whose odds are those of `chance` times `factor`."""
    odds = chance / (1.0 - chance) * factor
    return float(min(odds / (1.0 + odds), MOST))


@compiled
def pool_tried(groups: Floats, classes: int) -> float:
    """All trials of a drafter: each counts for one class, or for "no class". groups: (G, 5) of the drafter."""
    total = 0.0
    for row in range(1 + classes):
        total += groups[row, TOTAL_TRIALS]
    return total


@compiled
def shrinkage_weight(pool: float, group: Floats, strength: float) -> float:
    """Shrinkage weight of a group's own mean against the pool's, 0 to 1. With n recent trials, strength s, share p of
    the pool's trials:

        max(0, n - s * p / (1 - p)) / (n + s)

    The group's own trials are part of the pool's mean, so a group that makes up the whole pool gets 0: it cannot differ
    from itself.
    """
    if group[RECENT_TRIALS] <= 0.0:
        return 0.0
    share = min(0.999, group[TOTAL_TRIALS] / max(pool, 1e-9))
    return float(max(0.0, group[RECENT_TRIALS] - strength * share / (1.0 - share)) / (group[RECENT_TRIALS] + strength))


@compiled
def ratio(group: Floats, weight: float, column: int) -> float:
    """Odds of acceptance in the group / odds that the pool expects. column: EXPECTED_BINNED or EXPECTED_UNBINNED."""
    if weight <= 0.0:
        return 1.0
    mean = min(max(group[column] / group[RECENT_TRIALS], LEAST), MOST)
    own = min(max(mean + weight * (group[RECENT_ACCEPTED] / group[RECENT_TRIALS] - mean), LEAST), MOST)
    return float(own * (1.0 - mean) / ((1.0 - own) * mean))


@compiled
def class_factors(pool: float, groups: Floats, classes: int, column: int) -> Floats:
    """(1 + classes,): factor of each class; the first one for requests without a class. groups: (G, 5) of a drafter."""
    factors = np.empty(1 + classes)
    for row in range(1 + classes):
        factors[row] = ratio(groups[row], shrinkage_weight(pool, groups[row], CLASS_TRIALS), column)
    return factors


@compiled
def factor_of(of_class: Floats, pool: float, groups: Floats, slo_class: int, slot: int, column: int) -> float:
    """Factor of a request's odds: its class's factor times its own. of_class: see `class_factors`."""
    own = groups[len(of_class) + slot]
    in_common = of_class[min(slo_class, len(of_class) - 2) + 1]
    return float(in_common * ratio(own, shrinkage_weight(pool, own, SLOT_TRIALS), column))


@compiled
def count_trial(
    groups: Floats, pool: float, rows: tuple[int, int], binned: float, blind: float, accepted: bool
) -> None:
    """Count one trial for its class, then for its slot, whose factor is fitted to what the class's leaves unexplained.

    groups: (G, 5) of its drafter. rows: of its class and its slot. binned, blind: the pool's acceptance rate with and
    without regard to confidence.
    """
    for j in range(2):
        group, strength = groups[rows[j]], (CLASS_TRIALS, SLOT_TRIALS)[j]
        group[:TOTAL_TRIALS] *= min(1.0, (MOST_TRIALS, MOST_SLOT_TRIALS)[j] / (group[RECENT_TRIALS] + 1.0))
        weight = shrinkage_weight(pool, group, strength)
        by_bin, by_any = ratio(group, weight, EXPECTED_BINNED), ratio(group, weight, EXPECTED_UNBINNED)
        group[RECENT_TRIALS] += 1.0
        group[RECENT_ACCEPTED] += accepted
        group[EXPECTED_BINNED] += binned
        group[EXPECTED_UNBINNED] += blind
        group[TOTAL_TRIALS] += 1.0
        binned, blind = with_factor(binned, by_bin), with_factor(blind, by_any)
