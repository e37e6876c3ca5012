"""The right to write ConfigMaps and services is no right to create pods of one's own design."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from outrider_crds.runtime_config import CONFIG_KEY, BootConfig
from outrider_operator.cluster_model import CONFIG_MAP, DEPLOYMENT, Object, revision_map_name
from outrider_operator.decide.desired.revisions import INPUTS_LABEL, TEMPLATE_KEY
from pydantic import ValidationError

from tests.unit.operator.decide.world import World, boot_configs_read, manifest

HOST = {"name": "host", "hostPath": {"path": "/"}}


@pytest.fixture
def world() -> World:
    return World(manifest()).served()


def test_pods_are_not_made_of_a_forged_revision(world: World) -> None:
    """Deleted and created again with the node's `/` in its template: the old pods stay, the ConfigMap is made again."""
    template = copy.deepcopy(world.deployment()["spec"]["template"])
    genuine = _forge(world, world.revision())
    world.change(replicas=2)
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
    world.change(engine={"maxModelLen": 512})
    world.roll_out()
    _forge(world, first)
    world.change(engine={})
    assert world.revision() == first
    assert HOST not in world.deployment()["spec"]["template"]["spec"]["volumes"]


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"extraArgs": ["--trust-remote-code"]}},
        {"target": {"name": "attacker/model", "source": {"hub": {}}}},
        {"profileKeys": [{"product": "cpu", "target": "a1", "drafters": {}}]},
    ],
    ids=["engine", "target", "keys"],
)
def test_a_forged_boot_config_is_replaced_like_a_template(world: World, change: dict[str, Any]) -> None:
    """Pods would mount it together with their Secrets."""
    document = world.objects[CONFIG_MAP, revision_map_name("chat", world.revision())]
    genuine = document["data"]
    document["data"] = {**genuine, CONFIG_KEY: json.dumps({**json.loads(genuine[CONFIG_KEY]), **change})}
    plan = world.reconcile()
    assert not [child for child in plan.apply if child["kind"] == DEPLOYMENT], "no pods of it meanwhile"
    world.settle()
    assert world.objects[CONFIG_MAP, revision_map_name("chat", world.revision())]["data"] == genuine


@pytest.mark.parametrize(
    "keys",
    [
        [{"product": "x" * 300, "target": "7e", "drafters": {}}],
        [{"product": "cpu", "target": "../../../x", "drafters": {}}],
        [{"product": "cpu", "target": "7e", "drafters": {}}] * 2,
        [{"product": f"p{number}", "target": "7e", "drafters": {}} for number in range(9)],
    ],
    ids=["long", "path", "twice", "nine"],
)
def test_keys_that_the_status_could_not_name_are_no_boot_config(world: World, keys: list[Any]) -> None:
    """A product of 300 characters ended every decision, the same twice every status write."""
    document = world.objects[CONFIG_MAP, revision_map_name("chat", world.revision())]
    with pytest.raises(ValidationError):
        BootConfig.read(json.dumps({**json.loads(document["data"][CONFIG_KEY]), "profileKeys": keys}))


def test_revision_under_another_specs_label_is_not_reused(world: World) -> None:
    """Labels of an immutable ConfigMap can be changed: the old revision passed for the new spec's."""
    first = world.revision()
    world.change(engine={"maxModelLen": 512})
    world.roll_out()
    second = world.revision()
    maps = [world.objects[CONFIG_MAP, revision_map_name("chat", name)] for name in (first, second)]
    maps[0]["metadata"]["labels"][INPUTS_LABEL] = maps[1]["metadata"]["labels"][INPUTS_LABEL]
    del world.objects[CONFIG_MAP, revision_map_name("chat", second)]
    world.settle()
    assert world.revision() == second


def test_a_forged_revision_costs_no_decision_its_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays in place of one that old pods still have, as large as a ConfigMap may be."""
    first = world.revision()
    world.change(engine={"maxModelLen": 512})
    world.roll_out()
    _forge(world, first)
    reads = boot_configs_read(monkeypatch)
    world.reconcile()
    assert (CONFIG_MAP, revision_map_name("chat", first)) in world.objects
    assert len(reads) == 1, "the genuine one of the new pods"


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
