"""What the status and the canary's Deployment remember."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.counters import ArmCounters
from outrider_crds.status import RolloutStatus
from outrider_operator.decide.canary.arms import Arms, Ledger, PodReport
from outrider_operator.decide.canary.machine import Canary, CanaryPhase, Cause
from outrider_operator.decide.canary.record import RECORD_ANNOTATION, canary_of, record_text, recorded, sums_of

LOOK_AT = 1795856400.0 + 3600.0
LEDGER = Ledger(
    {
        "H200": Arms(
            ArmCounters(
                requests=5, tokens=100, plain_s=3.25, speculated_s=3.0, price_s=1.5, plain_squared=2.5,
                price_squared=0.5, plain_times_price=30.25, failures=1, finished={"chat": 5}, attained={"chat": 4},
            ),
            ArmCounters(requests=6, tokens=120, plain_s=2.5, speculated_s=2.25, price_s=1.25),
        )
    },
    {"H200": 1},
    (PodReport("pod-0", "H200", 1000.5, Arms(ArmCounters(requests=7), ArmCounters(requests=8)), 1),),
)  # fmt: skip


def status(requests: int = 7, **fields: Any) -> RolloutStatus:
    counted = ArmCounters(requests=requests)
    ledger = Ledger(LEDGER.ended, {}, (PodReport("pod-0", "H200", 1000.5, Arms(counted, counted)),))
    defaults: dict[str, Any] = {"phase": "Measuring", "candidate": "new", "stable": "old"}
    return RolloutStatus(**{**defaults, "started_at": "2026-11-28T09:00:00Z", "sums": sums_of(ledger), **fields})


def on_deployment(text: str) -> dict[str, Any]:
    return {"metadata": {"annotations": {RECORD_ANNOTATION: text}}}


def test_a_canary_comes_back_from_the_status_as_it_was() -> None:
    """Each number of the ledger; an operator that starts again loses none."""
    written = status(sums=sums_of(LEDGER), cause="Timeout", detail="why", obeyed=["abort=new"])
    written = written.model_copy(
        update={"held_seconds": 60, "candidate_percent": 5, "held_since": "2026-11-28T09:10:00Z"}
    )
    canary = canary_of(RolloutStatus.model_validate_json(written.model_dump_json(by_alias=True)))
    assert canary == Canary(
        CanaryPhase.MEASURING,
        "new",
        "old",
        1795856400.0,
        Cause.TIMEOUT,
        "why",
        ("abort=new",),
        LEDGER,
        candidate_percent=5,
        held_s=60.0,
        held_since=1795857000.0,
    )


def test_the_record_counts_where_the_status_has_no_canary() -> None:
    deployment = on_deployment(record_text(status(), None))
    for lost in (None, RolloutStatus(ignored=["abort=x"])):
        record = recorded(lost, deployment, LOOK_AT)
        assert record is not None
        assert record.candidate == "new"
    assert recorded(None, on_deployment("{not json"), LOOK_AT) is None


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
    assert record_text(status(105), on_deployment(stored)) == stored
    assert record_text(status(200), on_deployment(stored)) != stored
    assert record_text(status(100, phase="Failed"), on_deployment(stored)) != stored


def test_a_record_of_many_pods_leaves_the_sums_to_the_status() -> None:
    """Bug avoided: the cache drops what is too large, so that it would be written for ever."""
    lengthy = {"plain_squared": 2.123456789, "price_squared": 0.123456789, "plain_times_price": 30.123456789}
    counted = ArmCounters(requests=5, tokens=100, plain_s=2.0, speculated_s=1.0, price_s=1.123456789, **lengthy)
    arms = Arms(counted, counted)
    reports = tuple(PodReport(f"chat-canary-{index}", "H200", 1000.5, arms) for index in range(64))
    text = record_text(status(sums=sums_of(Ledger({}, {}, reports))), None)
    assert len(text) < 8192
    assert recorded(None, on_deployment(text), LOOK_AT) is not None
