"""ConfigMaps are watched by their metadata: a decision says what it has to read, and of what others own nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from outrider_operator.decide import decide
from outrider_operator.model import CONFIG_MAP, Object, Observed, hot_map_name
from outrider_operator.plan import Plan

from tests.unit.operator.decide.world import EAGLE, PLD, SETTINGS, World, manifest


@pytest.fixture
def world() -> World:
    """Two services that share a target's profile, one of them rolled out twice."""
    world = World(manifest("chat"), manifest("mail"))
    for name in ("chat", "mail"):
        world.serve(name)
    world.patch(draftPool=[PLD, EAGLE])
    world.settle()
    world.roll_out()
    world.settle()
    return world


@pytest.mark.parametrize(
    "change", [{}, {"draftPool": [PLD]}, {"engine": {"maxModelLen": 512}}, {"replicas": 3}], ids=str
)
def test_what_is_decided_does_not_depend_on_who_read_what_before(world: World, change: dict[str, Any]) -> None:
    """With everything in sight from the start, and with everything read on demand."""
    world.patch(**change)
    whole = world.observed()
    plan, read = _reading(whole)
    assert plan == decide(whole, SETTINGS)
    assert hot_map_name("chat") in read
    assert len(set(read)) == len(read), "each is read once"


def test_nothing_is_done_before_what_it_stands_on_is_read(world: World) -> None:
    """A profile without contents looks like one that was never measured: a Job would be made for it."""
    plan = decide(_unread(world.observed(), ()), SETTINGS)
    assert plan == Plan(status=plan.status, read=plan.read)
    assert plan.status == world.observed().status
    assert not plan.is_idle


def test_what_others_filled_up_is_not_read(world: World) -> None:
    """Outrider's labels and an owner can be typed in by hand, 600 times, with 900 kB each."""
    whole = world.observed()
    ballast = _ballast(whole, "ballast-{}", owner="uid-chat")
    profiles = _ballast(whole, "outrider-profile-{}", owner="uid-chat")
    observed = replace(
        whole,
        children={**whole.children, **{(CONFIG_MAP, name): each for name, each in ballast.items()}},
        profiles={**whole.profiles, **profiles},
    )
    _, read = _reading(observed)
    assert not {*ballast, *profiles} & set(read)


def _reading(whole: Observed) -> tuple[Plan, list[str]]:
    """The plan once all that it asks for was read, and what that was."""
    read: list[str] = []
    for _ in range(3):
        plan = decide(_unread(whole, read), SETTINGS)
        if not plan.read:
            break
        read += plan.read
    return plan, read


def _unread(whole: Observed, read: list[str] | tuple[str, ...]) -> Observed:
    """As watches show it: the contents of no ConfigMap but those of `read`."""

    def shown(document: Object) -> Object:
        if document["kind"] != CONFIG_MAP or document["metadata"]["name"] in read:
            return document
        return {name: value for name, value in document.items() if name not in ("data", "immutable")}

    children = {key: shown(child) for key, child in whole.children.items()}
    return replace(whole, children=children, profiles={name: shown(each) for name, each in whole.profiles.items()})


def _ballast(whole: Observed, name: str, owner: str) -> dict[str, Object]:
    hot = whole.children[CONFIG_MAP, hot_map_name("chat")]
    owners = [{**hot["metadata"]["ownerReferences"][0], "uid": owner}]
    names = [name.format(number) for number in range(3)]
    return {each: {**hot, "metadata": {**hot["metadata"], "name": each, "ownerReferences": owners}} for each in names}
