"""A changed hot config is read within seconds: the operator touches the pods, and only those that have it not."""

from __future__ import annotations

import pytest
from outrider_operator.cluster_model import CONFIG_MAP
from outrider_operator.decide.workloads.refreshes import AGAIN_S, HOT_ANNOTATION

from tests.unit.operator.decide.world import World, manifest


@pytest.fixture
def world() -> World:
    """Two pods that report the config in force."""
    return World(manifest(replicas=2)).served()


def marks(world: World) -> list[str]:
    return [pod["metadata"]["annotations"].get(HOT_ANNOTATION, "") for pod in world.pods.values()]


def test_a_pod_that_is_up_to_date_is_never_touched(world: World) -> None:
    """A service that comes up, and one whose operator is upgraded, cost no write for each pod."""
    assert marks(world) == ["", ""]


def test_a_hot_change_touches_each_pod_once_it_is_stored(world: World) -> None:
    """Touched before that, a kubelet would read the old one again."""
    world.patch(speculation={"mode": "Off"})
    plan = world.reconcile()
    assert (plan.apply[0]["kind"], plan.annotate) == (CONFIG_MAP, ())
    plan = world.reconcile()
    assert len(plan.annotate) == 2
    assert plan.requeue_after_s == AGAIN_S
    assert world.reconcile().annotate == ()


def test_a_kubelet_that_heard_of_the_pod_first_is_touched_again(world: World) -> None:
    """Never a third time: a pod that cannot take the config on must not be written for ever."""
    world.change(speculation={"mode": "Off"})
    world.now += AGAIN_S
    assert len(world.reconcile().annotate) == 2
    world.now += AGAIN_S
    plan = world.reconcile()
    assert plan.annotate == ()
    assert plan.requeue_after_s is None or plan.requeue_after_s > AGAIN_S


def test_pod_that_took_or_refused_a_config_is_not_touched_again(world: World) -> None:
    world.change(speculation={"mode": "Off"})
    world.report_states()
    first, second = world.states
    world.states[first] = world.states[first].model_copy(update={"config_hash": "old", "config_error": "unreadable"})
    world.now += AGAIN_S
    assert world.reconcile().annotate == ()
    assert second in world.states


def test_the_next_change_touches_again(world: World) -> None:
    for mode in ("Off", "Static"):
        world.patch(speculation={"mode": mode})
        world.reconcile()
        assert len(world.reconcile().annotate) == 2


@pytest.mark.parametrize("mark", ["x", "/", "{hash}/", "{hash}/-1", "{hash}/" + "9" * 5000, "{hash}/\u0661"])
def test_an_annotation_that_anyone_wrote_is_read_without_a_trace(world: World, mark: str) -> None:
    """A number of 5,000 digits, no number, digits that are no ASCII."""
    world.patch(speculation={"mode": "Off"})
    world.reconcile()
    plan = world.reconcile()
    hot_hash = plan.annotate[0].annotations[HOT_ANNOTATION].partition("/")[0]
    for pod in world.pods.values():
        pod["metadata"]["annotations"][HOT_ANNOTATION] = mark.replace("{hash}", hot_hash)
    world.reconcile()
