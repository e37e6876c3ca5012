"""Figures of a head: acceptance by position, tokens per step."""

from __future__ import annotations

import math
from collections.abc import Sequence


def format_figure(rates: Sequence[float]) -> str:
    """Return the line that heads are compared by."""
    tokens = f"{tokens_per_step(rates):.2f} tokens a step at draft length {len(rates)}"
    return f"acceptance per position {format_rates(rates)}; {tokens}"


def format_rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.3f}" for rate in rates)


def tokens_per_step(rates: Sequence[float]) -> float:
    """Return 1 + sum over k of prod(rates[:k + 1]): the bonus token, and each draft token by its path probability."""
    return 1.0 + sum(math.prod(rates[: position + 1]) for position in range(len(rates)))
