"""Bar 7, from the documents of the two benchmarks that measure it."""

from __future__ import annotations

import pytest

from tests.benchmarks.analysis import cost


def skipped(ours: float) -> dict[str, object]:
    def one(arm: str, batch: int, ratio: float) -> dict[str, object]:
        return {
            "arm": arm, "batch": batch, "ratio": ratio, "median_tokens_per_s": 100 * ratio,
            "ratio_quartiles": [ratio, ratio],
        }  # fmt: skip

    return {
        "points": [one(cost.STOCK, 1, 1.0), one(cost.OURS, 1, 0.99), one(cost.STOCK, 8, 1.0), one(cost.OURS, 8, ours)]
    }


def decision(at_64: float, at_256: float) -> dict[str, object]:
    points = [{"batch": b, "median_us": us, "fastest_tenth_us": us} for b, us in ((64, at_64), (256, at_256))]
    return {"load_average": 0.1, "points": points}


@pytest.mark.parametrize(("ours", "met"), [(0.98, True), (0.96, False)])
def test_the_worst_batch_counts(ours: float, met: bool) -> None:
    idle, *_ = cost.bars(7, skipped(ours), None)
    assert idle.met is met
    assert idle.ratio == ours
    assert idle.baseline == "none (batch 8)"


def test_decisions_have_a_bound_at_each_batch() -> None:
    _, at_64, at_256 = cost.bars(7, None, decision(199.0, 1001.0))
    assert at_64.met
    assert at_256.met is False


def test_what_was_not_measured_is_not_judged() -> None:
    assert [bar.met for bar in cost.bars(7, None, None)] == [None, None, None]
