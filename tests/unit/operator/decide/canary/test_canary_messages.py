"""What the status says of a canary under way, and how often."""

from __future__ import annotations

import pytest
from outrider_crds.runtime_state import CanaryState
from outrider_operator.decide.canary.summary import duration

from tests.unit.operator.decide.canary.canary_world import NAME, CanaryWorld, arm, under_way
from tests.unit.operator.decide.world import EAGLE, PLD


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
    """Bug: requests were divided by all the time since the start, in which the pod had loaded for ten minutes and no
    request had come for an hour."""
    world = CanaryWorld()
    world.change(draftPool=[PLD, EAGLE])
    world.now += 600
    world.start_canary()
    world.measure_arms(0)
    assert world.rollout.message == "0 requests of each arm. No traffic reaches both arms yet."
    world.watch(3600)
    world.measure_arms(10)
    assert world.rollout.message.endswith("10 requests of each arm. It is too early to say how many more it takes.")
    world.watch(600)
    world.measure_arms(600, -0.029)
    assert "600 requests of each arm. At this traffic (60 requests of each arm a minute)" in world.rollout.message
    assert world.rollout.idle_seconds == 3601
    world.measure_arms(600, 0.0)
    assert world.rollout.message.endswith(" minutes more.")


@pytest.mark.parametrize(
    ("steps", "max_num_seqs", "named"),
    [
        ([], 64, "]."),
        ([7], 64, "], in batches of 1."),
        ([4, 60, 30, 6, 0, 0], 64, "], in batches of 2 to 15."),
        ([0, 9], 64, "2 to 3."),
        ([0, 9, 9], 6, "2 to 6."),
        ([0, 0, 9], 4, "], in batches of 4."),
    ],
)
def test_the_verdict_names_the_batch_sizes_that_it_saw(steps: list[int], max_num_seqs: int, named: str) -> None:
    """Bugs: a draft that gains alone and loses at 64 was promoted at night, and nothing said which loads were seen;
    "4 to 7" was said of an engine that runs four requests."""
    world = CanaryWorld(engine={"extraArgs": ["--max-num-seqs", str(max_num_seqs)]})
    world.patched()
    arms = {"stable": arm(1000, 100.0), "candidate": arm(1000, 110.0).model_copy(update={"batch_steps": steps})}
    world.measure_arms(canary=CanaryState(id=world.order["id"], **arms))
    assert world.phase == "Promoting"
    assert world.rollout.message.endswith(named)


def test_batch_sizes_kept_after_engine_is_made_smaller() -> None:
    """What was measured in larger batches is not said of the smaller ones."""
    world = CanaryWorld()
    world.patched()
    arms = {"stable": arm(1000, 100.0), "candidate": arm(1000, 110.0).model_copy(update={"batch_steps": [0, 0, 9]})}
    world.measure_arms(canary=CanaryState(id=world.order["id"], **arms))
    world.replace_pods()
    world.settle()
    assert world.phase == "Successful"
    world.change(engine={"extraArgs": ["--max-num-seqs=2"]})
    assert world.rollout.message.endswith("in batches of 4 to 7.")


@pytest.mark.parametrize(
    ("minutes", "said"), [(0.2, "a minute"), (1.4, "a minute"), (1.6, "2 minutes"), (150.0, "2 hours")]
)
def test_durations_are_in_words(minutes: float, said: str) -> None:
    assert duration(minutes) == said


def test_a_runtime_upgrade_that_waits_is_said() -> None:
    world = under_way()
    candidate = world.rollout.candidate
    world.settings = type(world.settings)(
        runtime_image_gpu="outrider/runtime:2", runtime_image_cpu="outrider/runtime-cpu:2"
    )
    world.annotate(**{"runtime-upgrade": "2"})
    world.settle()
    assert (world.phase, world.rollout.candidate) == ("Measuring", candidate)
    said = "The upgrade to runtime outrider/runtime-cpu:2 waits until the candidate is promoted or gone."
    assert world.rollout.message.endswith(said)


def test_it_does_not_write_while_nothing_changes() -> None:
    world = under_way()
    plan = world.settle()
    assert plan.is_idle
    assert plan.events == ()
