"""Format figures for the status with three significant digits, so that noise does not change it."""

from __future__ import annotations

from collections.abc import Sequence


def three_digits(value: float) -> str:
    """1234.5 -> "1230", 12.345 -> "12.3", 0 -> "0"."""
    return f"{float(f'{value:.3g}'):.10g}"


def rounded(value: float) -> int:
    """A count with three significant digits."""
    return int(float(f"{value:.3g}"))


def time_text(seconds: float) -> str:
    """Milliseconds below one second ("31.2ms"), seconds above ("1.5s")."""
    return f"{three_digits(seconds * 1000)}ms" if seconds < 1 else f"{three_digits(seconds)}s"


def bytes_text(count: int) -> str:
    """Format a size as a Kubernetes quantity: 1536 -> "1.5Ki"."""
    value, unit = float(count), ""
    for larger in ("Ki", "Mi", "Gi", "Ti"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{three_digits(value)}{unit}"


def percentile_s(counts: Sequence[float], bounds: Sequence[float], share: float) -> float | None:
    """The `share` quantile of a histogram with upper `bounds` and one more count than bounds.

    It is interpolated within a bucket. None without observations; the last bound if the quantile lies above it.
    """
    total = sum(counts)
    if total <= 0:
        return None
    rank, below, lower = share * total, 0.0, 0.0
    for count, bound in zip(counts, bounds, strict=False):
        if count > 0 and below + count >= rank:
            return lower + (bound - lower) * max(0.0, rank - below) / count
        below, lower = below + count, bound
    return bounds[-1]
