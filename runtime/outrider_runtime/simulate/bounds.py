"""Limits of a simulation's input: larger values are typing errors, or would take more than a day."""

from __future__ import annotations

import math

MOST_ARRIVALS = 1_000_000
"""Most requests at one rate."""
MOST_TOKENS = 1 << 20
"""Most tokens of a prompt, of an answer, or of a step."""
LEAST_STEP_TOKENS = 16
MOST_AT_ONCE = 1 << 14
"""Most concurrent requests of one engine."""
LEAST_RATE = 1e-6
MOST_RATE = 1e6
"""Bounds of a rate, in requests/s."""
MOST_WEIGHT = 1e6
"""Largest weight of an SLO class."""
MOST_SEED = (1 << 63) - 1  # the largest signed integer of 64 bits


def whole(text: str, least: int, most: int) -> int:
    """Parse a whole number within bounds. Raises ValueError with a sentence."""
    number = int(text) if text.isdecimal() and len(text) <= len(str(most)) else -1
    if not least <= number <= most:
        raise ValueError(f"{text} is not a whole number from {least} to {most}")
    return number


def rate(text: str) -> float:
    """Parse a rate in requests/s. Raises ValueError with a sentence."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not LEAST_RATE <= number <= MOST_RATE:
        raise ValueError(f"{text} is not a number of requests a second from {LEAST_RATE:g} to {MOST_RATE:g}")
    return number
