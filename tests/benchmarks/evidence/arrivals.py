"""When requests arrive: Poisson at a rate, or a trace's gaps scaled to one. Pure; the random source is passed in."""

from __future__ import annotations

import itertools
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
    """Arrival times up to `seconds` with the trace's gaps from its start, scaled to so many requests a second.

    No scaled gap is over `longest_gap_s`; the others are that much longer, so that the rate holds. Raises ValueError
    when the trace is too short, or the rate so low that gaps must be longer.
    """
    wanted = max(2, round(rate_per_s * seconds))
    used = gaps_s[:wanted]
    if len(used) < wanted:
        raise ValueError(f"the trace has {len(gaps_s)} gaps; {wanted} requests are needed")
    scale = _scale(sorted(used, reverse=True), seconds, longest_gap_s)
    return list(itertools.accumulate(min(gap * scale, longest_gap_s) for gap in used))


def _scale(gaps_s: Sequence[float], total_s: float, longest_s: float) -> float:
    """By what the gaps, longest first, are multiplied so that they sum to `total_s` once cut to `longest_s`."""
    for cut, gap in enumerate(gaps_s):
        scale = (total_s - cut * longest_s) / max(sum(gaps_s[cut:]), 1e-9)
        if 0 <= gap * scale <= longest_s * (1 + 1e-9):
            return scale
    raise ValueError(f"{len(gaps_s)} gaps of at most {longest_s:g} s do not fill {total_s:g} s; raise longest_gap_s")
