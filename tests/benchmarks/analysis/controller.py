"""What the controller did at a point: differences of its counters. To find out why a bar was missed."""

from __future__ import annotations

from typing import Any

from outrider_crds.state import DrafterState, RuntimeState

from tests.benchmarks.evidence.raw import MeasuredPoint

COUNTERS = ("request_steps", "tried", "verified", "accepted")


def controller_of(point: MeasuredPoint) -> dict[str, Any] | None:
    """None of a system that has no controller of ours. The last steps may be missing: the state lags a little."""
    if point.state_before is None or point.state_after is None:
        return None
    before, after = (RuntimeState.model_validate(one) for one in (point.state_before, point.state_after))
    steps = after.steps - before.steps
    lengths = _differences(before.draft_length_steps, after.draft_length_steps)
    return {
        "choice": after.choice.model_dump(),
        "profile": after.profile.source.value,
        "steps": steps,
        "speculative_steps": after.speculative_steps - before.speculative_steps,
        "mean_draft_length": _ratio(sum(k * count for k, count in enumerate(lengths)), sum(lengths)),
        "draft_length_steps": lengths,
        "step_ms": _ratio(1e3 * (after.busy_s - before.busy_s), steps),
        "decision_us": _ratio(1e6 * (after.decision_s - before.decision_s), steps),
        "drafters": {
            new.name: _drafter(old, new) for old, new in zip(before.drafters, after.drafters, strict=True)
        },
        "probes": {
            name: round(value - getattr(before.speedup, name), 4) for name, value in after.speedup.model_dump().items()
        },
    }  # fmt: skip


def _drafter(before: DrafterState, after: DrafterState) -> dict[str, Any]:
    counted = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
    return {**counted, "acceptance": _ratio(counted["accepted"], counted["tried"]), "reason": after.reason}


def _differences(before: list[int], after: list[int]) -> list[int]:
    return [new - old for old, new in zip(before or [0] * len(after), after, strict=True)]


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None
