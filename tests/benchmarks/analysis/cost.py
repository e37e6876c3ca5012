"""Bar 7: what Outrider costs where it does nothing, from the results of two benchmarks of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.benchmarks.analysis.bar import Bar, judged

OF_STOCK = 0.97
DECISION_US = {64: 200.0, 256: 1000.0}
OURS, STOCK = "Outrider, k = 0", "stock, no speculation"


def bars(scenario: int, skipped: Mapping[str, Any] | None, decision: Mapping[str, Any] | None) -> list[Bar]:
    """`skipped`, `decision`: what skip_draft_at_k0 and controller_decision wrote; None where they did not run."""
    return [_idle(scenario, skipped), *(_decision(scenario, decision, batch) for batch in DECISION_US)]


def _idle(scenario: int, skipped: Mapping[str, Any] | None) -> Bar:
    bar = Bar(scenario, "throughput with k pinned to 0 by stock vLLM without speculation", OF_STOCK, at_least=True)
    if skipped is None:
        return bar
    of_arm = {(one["arm"], one["batch"]): one for one in skipped["points"]}
    worst = min((one for one in skipped["points"] if one["arm"] == OURS), key=lambda one: one["ratio"])
    stock = of_arm[STOCK, worst["batch"]]
    return judged(
        replace(
            bar, ours=worst["median_tokens_per_s"], baseline=f"none (batch {worst['batch']})",
            best_baseline=stock["median_tokens_per_s"], ratio=worst["ratio"],
            note=f"quartiles of the rounds {worst['ratio_quartiles']}",
        )
    )  # fmt: skip


def _decision(scenario: int, decision: Mapping[str, Any] | None, batch: int) -> Bar:
    bar = Bar(scenario, f"median microseconds of a decision at batch {batch}", DECISION_US[batch], at_least=False)
    if decision is None:
        return bar
    point = next(one for one in decision["points"] if one["batch"] == batch)
    note = f"fastest tenth {point['fastest_tenth_us']}, load average {decision['load_average']}"
    return judged(replace(bar, ours=point["median_us"], ratio=point["median_us"], note=note))
