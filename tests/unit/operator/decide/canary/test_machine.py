"""The state machine of a canary: each row of the design's table, and what may come between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from outrider_crds.counters import ArmCounters
from outrider_crds.rollout_settings import OnInconclusive, RolloutCanary
from outrider_crds.rollout_status import RolloutStatus, RolloutSums
from outrider_operator.decide.canary.arms import arms_by_product
from outrider_operator.decide.canary.machine import CanaryPods, CanaryView, step
from outrider_operator.decide.canary.record import (
    OPEN,
    CanaryPhase,
    Cause,
    attempt_of,
    has_pods,
    keeps_away,
    measured_s,
    started_s,
)

START = 1_000_000.0
HOUR_S = 3600.0
LATE_S = 6 * HOUR_S
PLAIN_S = 4.0
"""Seconds that plain decoding takes for a request's tokens."""
LOOK = CanaryView(at=START, stable="old", candidate="new", pool_differs=True)
HOLD = RolloutCanary()


def arm(requests: int, rate: float) -> ArmCounters:
    """Requests of 200 tokens whose prices differ by 20%; `rate` tokens / second."""
    price = 200 / rate
    return ArmCounters(
        requests=requests, tokens=requests * 200, plain_s=requests * PLAIN_S, speculated_s=requests * PLAIN_S,
        price_s=requests * price, plain_squared=requests * PLAIN_S**2, price_squared=requests * 1.04 * price**2,
        plain_times_price=requests * PLAIN_S * price,
    )  # fmt: skip


def report(requests: int = 1000, gain: float = 0.0, started_at: float = START, **where: Any) -> RolloutSums:
    arms = {"stable": arm(requests, 100.0), "candidate": arm(requests, 100.0 * (1 + gain))}
    return RolloutSums(**{"pod": "a", "product": "H200", "started_at": started_at, **arms, **where})


def seen(*reports: RolloutSums, **fields: Any) -> CanaryView:
    pods = {name: fields.pop(name) for name in POD_FIELDS if name in fields}
    return replace(LOOK, pods=CanaryPods(reports=reports, living=frozenset("ab"), **pods), **fields)


POD_FIELDS = ("trouble", "not_loaded", "allowed_restarts")


def after(*looks: CanaryView, before: RolloutStatus | None = None) -> RolloutStatus:
    """What is remembered after the looks."""
    canary = before
    for look in looks:
        canary = step(canary, look).canary
    assert canary is not None
    return canary


def looks_until(last: CanaryView) -> list[CanaryView]:
    """A look a minute, as the operator takes them, and `last`."""
    return [*(replace(last, at=START + at) for at in range(0, int(last.at - START), 60)), last]


def in_phase(phase: str, **fields: Any) -> RolloutStatus:
    return under_way().model_copy(update={"phase": phase, **fields})


def requests_of(canary: RolloutStatus) -> float:
    return arms_by_product(canary.sums)["H200"].least_requests


def under_way() -> RolloutStatus:
    """A canary that is measured, without a verdict yet."""
    return after(LOOK, seen(report(10)))


@pytest.mark.parametrize(
    ("choice", "phase", "runs", "holds"),
    [
        (OnInconclusive.HOLD, CanaryPhase.INCONCLUSIVE, True, True),
        (OnInconclusive.ROLLBACK, CanaryPhase.INCONCLUSIVE, False, True),
        (OnInconclusive.PROMOTE, CanaryPhase.PROMOTING, False, False),
    ],
)
def test_no_verdict_in_time(choice: OnInconclusive, phase: CanaryPhase, runs: bool, holds: bool) -> None:
    settings = RolloutCanary(on_inconclusive=choice)
    late = replace(seen(report(1000, -0.03)), at=START + LATE_S, settings=settings)
    canary = after(*looks_until(replace(late, at=late.at - 1)), late, before=under_way())
    assert (canary.phase, canary.cause) == (phase, Cause.TIMEOUT)
    assert (has_pods(canary, settings), keeps_away(canary)) == (runs, holds)


@pytest.mark.parametrize("choice", list(OnInconclusive))
@pytest.mark.parametrize("jump_s", [7 * 24 * HOUR_S, -7 * 24 * HOUR_S])
def test_clock_that_jumps_decides_no_canary(choice: OnInconclusive, jump_s: float) -> None:
    """Bug: a week ahead was a timeout: three requests rolled the candidate out, or ended its measurement. A week back
    was another week to wait."""
    look = replace(seen(report(3)), settings=RolloutCanary(on_inconclusive=choice))
    away = replace(seen(), at=START + jump_s + 60)
    for jumped in (replace(look, at=away.at), away):
        canary = after(look, jumped, replace(look, at=START + 120), before=under_way())
        assert canary.phase == CanaryPhase.MEASURING
        assert 0 <= measured_s(canary, START + 120) <= 120


def test_time_without_operator_is_not_measured() -> None:
    looks = looks_until(seen(report(3), at=START + 600))
    canary = after(*looks, seen(report(40), at=START + HOUR_S), before=under_way())
    assert measured_s(canary, START + HOUR_S) == 600 + 120
    assert requests_of(canary) == 40


@pytest.mark.parametrize("phase", [*OPEN, CanaryPhase.FAILED])
def test_orders_by_hand_need_no_verdict(phase: CanaryPhase) -> None:
    """What has failed is aborted already."""
    orders = ({"promote": "new"}, {"abort": "new"})
    promoted, aborted = (after(replace(LOOK, orders=order), before=in_phase(phase)) for order in orders)
    assert (promoted.phase, promoted.cause) == ("Promoting", "")
    assert (aborted.phase, aborted.cause) == ("Failed", "" if phase == "Failed" else "AbortedByHand")


def test_retry_after_abort_is_not_aborted_by_the_old_annotation() -> None:
    """Both annotations name the revision, and both stay: each is obeyed once."""
    aborted = after(replace(LOOK, orders={"abort": "new"}), before=under_way())
    again = replace(LOOK, at=START + 60, orders={"abort": "new", "retry": "new/2"})
    canary = after(again, before=aborted)
    assert (canary.phase, started_s(canary), canary.sums) == (CanaryPhase.STARTING, START + 60, [])
    assert started_s(after(replace(again, at=START + 90), before=canary)) == START + 60
    assert after(replace(again, orders={"abort": "new/2"}), before=canary).phase == CanaryPhase.FAILED


@pytest.mark.parametrize("order", ["promote", "abort"])
def test_obeyed_annotation_has_no_effect_on_a_later_canary(order: str) -> None:
    """Bug: the next canary of the candidate was promoted without a request, or failed, by an order of long ago."""
    orders = {order: "new"}
    left = after(replace(LOOK, orders=orders), before=under_way()).model_copy(update={"phase": "Cancelled"})
    other = after(replace(LOOK, candidate="third", orders=orders), before=left)
    back = replace(LOOK, at=START + 60, orders=orders)
    canary = after(back, replace(back, at=START + 61), before=other)
    assert (canary.phase, canary.candidate) == (CanaryPhase.STARTING, "new")


@pytest.mark.parametrize("phase", [CanaryPhase.SUCCESSFUL, CanaryPhase.PROMOTING])
@pytest.mark.parametrize("order", ["promote", "abort", "retry"])
def test_order_that_came_too_late_does_not_decide_next_canary(phase: CanaryPhase, order: str) -> None:
    """Bug: promote of a candidate that had been promoted anyway stayed an order. When it came back after another pool,
    it was rolled out without a request."""
    late = replace(LOOK, stable="new", orders={order: "new"})
    canary = after(late, before=in_phase(phase))
    for stable, candidate in (("new", "third"), ("third", "fourth")):
        other = after(replace(late, stable=stable, candidate=candidate), before=canary)
        canary = other.model_copy(update={"phase": "Successful"})
    back = replace(late, stable="fourth", at=START + 60)
    canary = after(back, replace(back, at=START + 61), before=canary)
    assert (canary.phase, canary.candidate) == (CanaryPhase.STARTING, "new")


def test_abort_of_failed_candidate_does_not_end_its_retry() -> None:
    """Bug: the abort had nothing to do, and was carried out a moment after the retry."""
    failed = after(seen(report(1000, -0.1)), before=under_way())
    orders = {"abort": "new", "retry": "new"}
    again = replace(LOOK, at=START + 60, orders=orders)
    canary = after(again, replace(again, at=START + 61), before=failed)
    assert (canary.phase, started_s(canary)) == (CanaryPhase.STARTING, START + 60)


def test_retry_of_measured_candidate_is_spent() -> None:
    """Bug: it started the canary again by itself, once that had failed."""
    look = seen(report(1000, -0.1), orders={"retry": "new"})
    canary = after(look, replace(look, at=START + 60), before=under_way())
    assert (canary.phase, started_s(canary)) == (CanaryPhase.FAILED, START)


@pytest.mark.parametrize("phase", [phase for phase in CanaryPhase if phase not in ("Superseded", "Cancelled")])
def test_a_step_that_is_repeated_changes_nothing(phase: CanaryPhase) -> None:
    """Level-based: an operator that was killed between its writes decides the same again."""
    stable = "new" if phase is CanaryPhase.SUCCESSFUL else "old"
    look = seen(report(10), at=START + 5, stable=stable)
    once = step(in_phase(phase), look).canary
    assert step(once, look).canary == once


def test_sums_of_a_pod_that_is_gone_stay_once() -> None:
    after_loss = [seen(report(40)), seen(report(5, pod="b")), seen(report(6, pod="b"))]
    after_loss[1:] = [replace(look, pods=replace(look.pods, living=frozenset("b"))) for look in after_loss[1:]]
    canary = after(LOOK, *after_loss)
    assert requests_of(canary) == 46


def test_pod_that_comes_back_into_view_counts_once() -> None:
    """Bug: its sums were added to those of ended processes, and again by its next report."""
    away = replace(seen(), pods=CanaryPods(living=frozenset()))
    canary = after(LOOK, seen(report(40)), away, seen(report(41)))
    assert requests_of(canary) == 41


def test_reports_of_pods_that_are_gone_stay_few() -> None:
    """Bug avoided: the status kept a report for ever under each name that no pod has any more."""
    looks = [
        replace(
            LOOK, pods=CanaryPods(reports=(report(2, pod=f"p{n}", started_at=START + n),), living=frozenset((f"p{n}",)))
        )
        for n in range(100)
    ]
    canary = after(LOOK, *looks)
    pods = [entry.pod for entry in canary.sums if entry.pod]
    assert (pods.count("p99"), len(pods)) == (1, 16)
    assert requests_of(canary) == 200


@pytest.mark.parametrize("phase", [CanaryPhase.SUPERSEDED, CanaryPhase.CANCELLED, CanaryPhase.SUCCESSFUL])
def test_superseded_candidate_is_measured_when_it_returns(phase: CanaryPhase) -> None:
    """Bug: the status still named it, so that it rolled out without a canary."""
    left = in_phase(phase)
    canary = after(replace(LOOK, at=START + 60), before=left)
    assert (canary.phase, started_s(canary), canary.sums) == (CanaryPhase.STARTING, START + 60, [])
    assert attempt_of(canary) != attempt_of(left)


@pytest.mark.parametrize("orders", [{}, {"retry": "new"}])
def test_a_later_attempt_has_another_name_under_a_slower_clock(orders: dict[str, str]) -> None:
    """An operator takes over whose clock is behind: sums of the attempt before must not be taken for the new one's."""
    phase = CanaryPhase.FAILED if "retry" in orders else CanaryPhase.CANCELLED
    before = in_phase(phase)
    for at in (START, START - 30):
        canary = after(replace(LOOK, at=at, orders=orders), before=before)
        assert (canary.phase, attempt_of(canary) != attempt_of(before)) == (CanaryPhase.STARTING, True)


@pytest.mark.parametrize(
    ("pods", "cause"),
    [
        ({"allowed_restarts": -1}, Cause.CANDIDATE_CRASHED),
        ({"not_loaded": "drafter x: 404"}, Cause.DRAFTER_NOT_LOADED),
    ],
)
def test_an_inconclusive_canary_whose_pod_stays_may_still_fail(pods: dict[str, Any], cause: Cause) -> None:
    """Bug: after the timeout nothing guarded the pod, which serves users until a human decides."""
    open_canary = in_phase(CanaryPhase.INCONCLUSIVE, cause=Cause.TIMEOUT)
    late = {"at": START + 9 * HOUR_S}
    assert after(seen(**pods, **late), before=open_canary).cause == cause
    assert after(seen(report(2000, -0.1), **late), before=open_canary).cause == Cause.WORSE
    better = after(seen(report(2000, 0.1), **late), before=open_canary)
    assert (better.phase, better.cause) == (CanaryPhase.INCONCLUSIVE, Cause.TIMEOUT)


def test_a_promotion_that_was_not_noted_goes_on() -> None:
    """The operator was killed between the Deployment's change and the status."""
    assert after(seen(stable="new"), before=under_way()).phase == CanaryPhase.PROMOTING


def test_promote_at_timeout_needs_requests_of_both_arms() -> None:
    """Bug: a candidate without any request was rolled out: missing data counted as success."""
    settings = RolloutCanary(on_inconclusive=OnInconclusive.PROMOTE)
    late = replace(seen(report(0)), at=START + LATE_S, settings=settings)
    canary = after(LOOK, *looks_until(late))
    assert (canary.phase, canary.cause) == (CanaryPhase.INCONCLUSIVE, Cause.NO_TRAFFIC)
    assert has_pods(canary, RolloutCanary(on_inconclusive=OnInconclusive.PROMOTE))
    of_one_product = replace(
        CanaryPods(reports=(report(3),), living=frozenset("ab")), products=frozenset(("H200", "L4"))
    )
    assert after(replace(late, pods=of_one_product), before=canary).phase == CanaryPhase.INCONCLUSIVE
    both = replace(of_one_product, products=frozenset(("H200",)))
    assert after(replace(late, pods=both), before=canary).phase == CanaryPhase.PROMOTING
