"""What a window says, and when it holds too little to say anything."""

from __future__ import annotations

from outrider_operator.model import Figures

LEAST_TOKENS = 50
LEAST_REQUESTS = 10
"""Below these a window says nothing."""


def attainment(figures: Figures, name: str) -> float | None:
    """Share of finished requests that met the class; None below the least sample."""
    found = figures.slo_classes.get(name)
    if found is None or found.finished < LEAST_REQUESTS:
        return None
    return found.attained / found.finished


def speedup(figures: Figures) -> float | None:
    """Measured goodput with speculation over that of the probes without; None when no probe ran."""
    probed = min(figures.baseline_tokens, figures.baseline_s, figures.speculative_tokens, figures.speculative_s) > 0
    if not probed:
        return None
    return (figures.speculative_tokens / figures.speculative_s) / (figures.baseline_tokens / figures.baseline_s)


def used_share(figures: Figures) -> float:
    """Share of (request, step) pairs that verified a proposal."""
    used = sum(drafter.request_steps for drafter in figures.drafters.values())
    return used / figures.request_steps if figures.request_steps > 0 else 0.0
