"""A human decides by an annotation of the service."""

from __future__ import annotations

from tests.unit.operator.decide.canary.canary_world import LOSS, NAME, CanaryWorld, under_way


def test_sums_of_another_attempt_do_not_count() -> None:
    """A retry has another id, and a pod reports the old one until it has read that."""
    world = under_way()
    world.measure_arms(1000, LOSS)
    world.annotate(retry=world.rollout.candidate)
    world.now += 60
    state = world.states[f"{NAME}-0"]
    world.settle()
    assert world.phase == "Starting"
    assert state.canary is not None
    assert world.order["id"] != state.canary.id
    world.start_canary()
    world.settle()
    assert (world.phase, world.rollout.sums) == ("Starting", [])


def test_annotation_without_a_revision_is_only_an_event() -> None:
    world = under_way()
    before = world.rollout
    world.annotate(promote="8a1e43c8ca")
    plan = world.reconcile()
    (event,) = [event for event in plan.events if event.reason == "CanaryOrderIgnored"]
    assert "promote=8a1e43c8ca names no revision" in event.message
    assert world.rollout.model_copy(update={"ignored": [], "message": before.message}) == before
    assert world.reconcile().events == ()


def test_an_annotation_without_any_canary_is_an_event() -> None:
    world = CanaryWorld()
    world.annotate(abort="nonsense")
    assert [event.reason for event in world.reconcile().events] == ["CanaryOrderIgnored"]
    assert world.settle().events == ()
