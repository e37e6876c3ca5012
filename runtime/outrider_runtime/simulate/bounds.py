"""What one simulation takes: beyond it the input is a slip, or the answer would not come today."""

from __future__ import annotations

import math

MOST_ARRIVALS = 1_000_000
"""Requests at one rate."""
MOST_TOKENS = 1 << 20
"""Of a prompt, of an answer, or of a step."""
LEAST_STEP_TOKENS = 16
MOST_AT_ONCE = 1 << 14
"""Requests that one engine runs side by side."""
LEAST_RATE, MOST_RATE = 1e-6, 1e6
"""Requests a second."""
MOST_WEIGHT = 1e6
"""Of an SLO class."""
MOST_SEED = (1 << 63) - 1


def whole(text: str, least: int, most: int) -> int:
    """Raises ValueError, with a sentence, for anything but a whole number within the bounds."""
    number = int(text) if text.isdecimal() and len(text) <= len(str(most)) else -1
    if not least <= number <= most:
        raise ValueError(f"{text} is not a whole number from {least} to {most}")
    return number


def rate(text: str) -> float:
    """Requests a second. Raises ValueError as `whole` does."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not LEAST_RATE <= number <= MOST_RATE:
        raise ValueError(f"{text} is not a number of requests a second from {LEAST_RATE:g} to {MOST_RATE:g}")
    return number
