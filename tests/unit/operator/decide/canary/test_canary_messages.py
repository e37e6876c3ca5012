"""What the status says of a canary under way, and how often."""

from __future__ import annotations

from outrider_crds.runtime_state import CanaryState

from tests.unit.operator.decide.canary.canary_world import NAME, arm, under_way


def test_doublings_of_the_requests_are_events() -> None:
    world = under_way()
    reasons = []
    for requests in (60, 70, 120, 140):
        world.now += 1
        arms = {"stable": arm(requests, 100.0), "candidate": arm(requests, 100.0)}
        canary = CanaryState(id=world.order["id"], **arms)
        world.states[f"{NAME}-0"] = world.states[f"{NAME}-0"].model_copy(update={"canary": canary})
        reasons.append([event.reason for event in world.reconcile().events])
    assert reasons == [[], ["CanaryMeasuring"], [], ["CanaryMeasuring"]]


def test_the_message_says_how_much_longer_it_takes() -> None:
    world = under_way()
    world.now += 600
    world.measure_arms(600, 0.0)
    assert (
        "600 requests of each arm. At this traffic (60 requests of each arm a minute) about " in world.rollout.message
    )
    assert world.rollout.message.endswith(" minutes more.")


def test_it_does_not_write_while_nothing_changes() -> None:
    world = under_way()
    plan = world.settle()
    assert plan.is_idle
    assert plan.events == ()
