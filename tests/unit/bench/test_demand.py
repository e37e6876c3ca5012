"""What the demand series is compared with: the rate at which a replayed pod passes the TPOT limit."""

from __future__ import annotations

import pytest

from bench.demand import capacity_per_s


def test_capacity_lies_between_the_runs_around_the_limit() -> None:
    """10 ms at 20 requests/s and 14 ms at 40: 12 ms at 30."""
    assert capacity_per_s([10.0, 20.0, 40.0], [9.0, 10.0, 14.0], 12.0) == pytest.approx(30.0)


@pytest.mark.parametrize("limit_ms", [8.0, 15.0])
def test_capacity_outside_the_runs_is_unknown(limit_ms: float) -> None:
    assert capacity_per_s([10.0, 20.0, 40.0], [9.0, 10.0, 14.0], limit_ms) is None
