"""The figure that heads are compared by."""

from __future__ import annotations

import math
from collections.abc import Sequence


def figure(rates: Sequence[float]) -> str:
    """The figure that heads are compared by."""
    tokens = f"{tokens_a_step(rates):.2f} tokens a step at draft length {len(rates)}"
    return f"acceptance per position {by_position(rates)}; {tokens}"


def by_position(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.3f}" for rate in rates)


def tokens_a_step(rates: Sequence[float]) -> float:
    """1 + sum of prod(rates[:k + 1]): the target's own token, and each drafted one if all before it were accepted."""
    return 1.0 + sum(math.prod(rates[: position + 1]) for position in range(len(rates)))
