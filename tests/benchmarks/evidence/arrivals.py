"""When requests arrive: Poisson at a rate, or a trace's gaps scaled to one. Pure; the random source is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


def poisson(rate_per_s: float, seconds: float, random: Random) -> list[float]:
    """Arrival times in [0, seconds)."""
    times, now = [], random.expovariate(rate_per_s)
    while now < seconds:
        times.append(now)
        now += random.expovariate(rate_per_s)
    return times


def from_trace(gaps_s: Sequence[float], rate_per_s: float, seconds: float, longest_gap_s: float) -> list[float]:
    """Arrival times in [0, seconds) with the trace's gaps from its start, scaled so that their mean asks for the rate.

    The scale comes from the gaps that are used: requests that fill `seconds` at that rate. A scaled gap over
    `longest_gap_s` is cut to that. Raises ValueError when the trace is too short.
    """
    wanted = max(2, round(rate_per_s * seconds))
    used = list(gaps_s[:wanted])
    if len(used) < wanted:
        raise ValueError(f"the trace has {len(gaps_s)} gaps; {wanted} requests are needed")
    scale = seconds / sum(used)
    times, now = [], 0.0
    for gap in used:
        now += min(gap * scale, longest_gap_s)
        times.append(now)
    return [time for time in times if time < seconds]
