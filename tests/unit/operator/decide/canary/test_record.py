"""What the status and the canary's Deployment remember."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.counters import ArmCounters
from outrider_crds.rollout_status import RolloutStatus, RolloutSums
from outrider_operator.decide.canary.record import RECORD_ANNOTATION, measured_s, record_text, recorded, with_clock

START, LOOK_AT = 1795856400.0, 1795856400.0 + 3600.0
ARM = ArmCounters(
    requests=5, tokens=100, plain_s=3.25, speculated_s=3.0, price_s=1.5, plain_squared=2.5, price_squared=0.5,
    plain_times_price=30.25, failures=1, finished={"chat": 5}, attained={"chat": 4},
)  # fmt: skip


def status(requests: int = 7, **fields: Any) -> RolloutStatus:
    arm = ArmCounters(requests=requests)
    sums = [RolloutSums(product="H200", pod="pod-0", started_at=1000.5, stable=arm, candidate=arm)]
    defaults: dict[str, Any] = {"phase": "Measuring", "candidate": "new", "stable": "old", "sums": sums}
    return RolloutStatus(**{**defaults, "started_at": "2026-11-28T09:00:00Z", **fields})


def on_deployment(text: str) -> dict[str, Any]:
    return {"metadata": {"annotations": {RECORD_ANNOTATION: text}}}


def test_the_record_counts_where_the_status_has_no_canary() -> None:
    """It holds all that a decision depends on, and nothing for people."""
    lasting: dict[str, Any] = {
        "cause": "Timeout", "detail": "why", "obeyed": ["abort=new"], "held_seconds": 60, "candidate_percent": 5,
        "held_since": "2026-11-28T09:10:00Z", "idle_seconds": 7, "restarts_before": {"chat-0": 30},
        "sums": [RolloutSums(product="H200", restarts=1, stable=ARM, candidate=ARM)],
    }  # fmt: skip
    deployment = on_deployment(record_text(status(**lasting, message="Gain 1%", gain_percent="1"), None))
    for lost in (None, RolloutStatus(ignored=["abort=x"])):
        assert recorded(lost, deployment, LOOK_AT) == status(**lasting)
    assert recorded(None, on_deployment("{not json"), LOOK_AT) is None


def test_canary_of_release_before_is_read_from_its_record() -> None:
    """The annotation that 3ad3996d wrote."""
    written = (
        '{"phase":"Measuring","candidate":"89c410ed2e","stable":"13b4549f6e","startedAt":"2026-11-28T09:00:00Z",'
        '"candidatePercent":50,"heldSeconds":60,"obeyed":["retry=89c410ed2e"],"sums":[{"product":"cpu","restarts":1,'
        '"stable":{"requests":3},"candidate":{"requests":4}},{"product":"cpu","pod":"chat-canary-0","startedAt":9.5,'
        '"stable":{"requests":10,"plainS":40.0},"candidate":{"requests":11,"finished":{"chat":2}}}]}'
    )
    canary = recorded(None, on_deployment(written), LOOK_AT)
    assert canary is not None
    assert measured_s(canary, START + 100.0) == 40.0
    assert [entry.candidate.requests for entry in canary.sums] == [4, 11]
    assert record_text(canary, on_deployment(written)) == written


def test_the_clock_runs_only_while_something_is_measured() -> None:
    stopped = with_clock(status(held_seconds=5), START + 10, runs=False)
    assert with_clock(stopped, START + 20, runs=False) == stopped
    assert measured_s(stopped, START + 30) == 5
    running = with_clock(stopped, START + 40, runs=True)
    assert (running.held_seconds, running.held_since, measured_s(running, START + 50)) == (35, "", 15)


@pytest.mark.parametrize("started_at", ["2026-11-28T08:59:59Z", "2026-11-28T09:00:01Z", "2099-01-01T00:00:00Z"])
def test_a_status_with_a_canary_wins_over_any_record(started_at: str) -> None:
    """Bug: a record of a later start was preferred at each look, and was never written again."""
    kept = status()
    assert recorded(kept, on_deployment(record_text(status(started_at=started_at), None)), LOOK_AT) is kept


def test_a_record_from_the_future_is_ignored() -> None:
    deployment = on_deployment(record_text(status(started_at="2099-01-01T00:00:00Z"), None))
    assert recorded(None, deployment, LOOK_AT) is None


def test_a_record_is_written_again_only_for_news() -> None:
    """Each write of the Deployment is one of its ReplicaSet, too."""
    stored = record_text(status(100), None)
    assert record_text(status(105, message="105 requests"), on_deployment(stored)) == stored
    assert record_text(status(200), on_deployment(stored)) != stored
    assert record_text(status(100, phase="Failed"), on_deployment(stored)) != stored


def test_a_record_holds_the_sums_of_a_dozen_pods() -> None:
    """Bug: counts by batch size, which no decision needs, took the room of two pods."""
    seconds = dict.fromkeys(("plain_s", "speculated_s", "price_s", "plain_squared", "price_squared"), 16492.12345678)
    needed = ARM.model_copy(update={"requests": 4123, "tokens": 823_456, "plain_times_price": 5e5 / 7, **seconds})
    arm = needed.model_copy(update={"batch_steps": [123_456] * 7})
    sums = [
        RolloutSums(product="H200", pod=f"chat-canary-7d4b9c6f5-{number:05d}", stable=arm, candidate=arm)
        for number in range(12)
    ]
    record = recorded(None, on_deployment(record_text(status(sums=sums), None)), LOOK_AT)
    assert record is not None
    assert [(entry.stable, entry.candidate) for entry in record.sums] == [(needed, needed)] * len(sums)


def test_a_record_of_many_pods_leaves_the_sums_to_the_status() -> None:
    """Bug avoided: the cache drops what is too large, so that it would be written for ever."""
    sums = [
        RolloutSums(product="H200", pod=f"chat-canary-{number}", started_at=1000.5, stable=ARM, candidate=ARM)
        for number in range(64)
    ]
    text = record_text(status(sums=sums), None)
    assert len(text) < 8192
    assert recorded(None, on_deployment(text), LOOK_AT) is not None
