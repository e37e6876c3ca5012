"""Who may write ConfigMaps and services, and nothing else of a namespace, makes no pods of their own design."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from outrider_operator.decide.revisions import TEMPLATE_KEY, revision_map_name
from outrider_operator.model import CONFIG_MAP, Object

from tests.unit.operator.decide.world import World, manifest

HOST = {"name": "host", "hostPath": {"path": "/"}}


@pytest.fixture
def world() -> World:
    world = World(manifest())
    world.serve()
    return world


def test_pods_are_not_made_of_a_forged_revision(world: World) -> None:
    """Deleted and made anew with the node's `/` in its template: the old pods stay, the ConfigMap is made again."""
    template = copy.deepcopy(world.deployment()["spec"]["template"])
    genuine = _forge(world, world.revision())
    world.patch(replicas=2)
    world.settle()
    assert world.deployment()["spec"]["template"] == template
    assert world.deployment()["spec"]["replicas"] == 2
    assert world.objects[CONFIG_MAP, revision_map_name("chat", world.revision())]["data"] == genuine


def test_a_revision_is_not_forged_before_its_first_pod(world: World) -> None:
    """The name of the next one can be known beforehand."""
    world.patch(engine={"maxModelLen": 512})
    world.reconcile()
    (new,) = {name for kind, name in world.objects if kind == CONFIG_MAP and name.startswith("chat-")} - {
        "chat-hot",
        revision_map_name("chat", world.revision()),
    }
    _forge(world, new.removeprefix("chat-"))
    world.settle()
    assert world.revision() == new.removeprefix("chat-")
    assert HOST not in world.deployment()["spec"]["template"]["spec"]["volumes"]


def test_a_forged_revision_that_is_returned_to_is_made_again(world: World) -> None:
    """The ReplicaSet that ran it tells what it was."""
    first = world.revision()
    world.patch(engine={"maxModelLen": 512})
    world.settle()
    world.roll_out()
    _forge(world, first)
    world.patch(engine={})
    world.settle()
    assert world.revision() == first
    assert HOST not in world.deployment()["spec"]["template"]["spec"]["volumes"]


def _forge(world: World, revision: str) -> Any:
    """Put a pod template with the node's files in the place of the revision's; returns the data before."""
    document = world.objects[CONFIG_MAP, revision_map_name("chat", revision)]
    genuine = document["data"]
    template = _template(world, revision)
    template["spec"]["volumes"] = [*template["spec"]["volumes"], HOST]
    document["data"] = {**genuine, TEMPLATE_KEY: json.dumps(template, sort_keys=True)}
    return genuine


def _template(world: World, revision: str) -> Object:
    document = world.objects[CONFIG_MAP, revision_map_name("chat", revision)]
    template: Object = json.loads(document["data"][TEMPLATE_KEY])
    return template
