"""ConfigMaps are watched by their metadata: a decision says what it has to read, and of what others own nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import pytest
from outrider_operator import cluster_model
from outrider_operator.cluster_model import Object, Observed
from outrider_operator.decide import decide
from outrider_operator.decide.desired.revisions import INPUTS_LABEL
from outrider_operator.plan import Plan

from tests.unit.operator.decide.world import EAGLE, PLD, SETTINGS, World, manifest


@pytest.fixture
def world() -> World:
    """Two services that share a target's profile, one of them rolled out twice."""
    world = World(manifest("chat"), manifest("mail"))
    for name in ("chat", "mail"):
        world.serve(name)
    world.change(draftPool=[PLD, EAGLE])
    world.replace_pods()
    return world


@pytest.mark.parametrize(
    "change", [{}, {"draftPool": [PLD]}, {"engine": {"maxModelLen": 512}}, {"replicas": 3}], ids=str
)
def test_the_plan_does_not_depend_on_what_was_read_before(world: World, change: dict[str, Any]) -> None:
    """The plan is equal with all contents from the start and with contents read on demand."""
    world.patch(**change)
    whole = world.observed()
    plan, read = _reading(whole)
    assert plan == decide(whole, SETTINGS)
    assert cluster_model.hot_map_name("chat") in read
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
        children={
            **whole.children,
            **{(cluster_model.CONFIG_MAP, name): document for name, document in ballast.items()},
        },
        profiles={**whole.profiles, **profiles},
    )
    _, read = _reading(observed)
    assert not {*ballast, *profiles} & set(read)


def test_a_new_revision_that_no_pod_was_made_of_yet_is_read_once(world: World) -> None:
    """The operator was started again between making its ConfigMap and its pods."""
    world.patch(engine={"maxModelLen": 512})
    world.reconcile()
    whole = world.observed()
    plan, read = _reading(whole)
    assert plan == decide(whole, SETTINGS)
    assert len(set(read)) == len(read)


@pytest.mark.parametrize("objected", [False, True], ids=["served", "objected"])
def test_maps_of_revisions_that_no_pod_was_made_of_are_not_read(world: World, *, objected: bool) -> None:
    """Users may label any number of ConfigMaps: reading and parsing 300 took seconds of every decision."""
    whole = world.observed()
    forged = {name: _sealed(document) for name, document in _revisions(whole).items()}
    children = {**whole.children, **{(cluster_model.CONFIG_MAP, name): document for name, document in forged.items()}}
    if objected:
        service = children[cluster_model.KUBERNETES_SERVICE, "chat"]
        foreign = [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x", "controller": True}]
        children[cluster_model.KUBERNETES_SERVICE, "chat"] = {
            **service,
            "metadata": {**service["metadata"], "ownerReferences": foreign},
        }
    observed = replace(whole, children=children)
    _, read = _reading(observed)
    assert not set(forged) & set(read)
    plan = decide(observed, SETTINGS)
    assert {document.name for document in plan.delete} == (set() if objected else set(forged))


def test_of_revisions_that_pods_were_made_of_a_few_are_read(world: World) -> None:
    """Users may vouch for any number by ReplicaSets, too. The Deployment's revision is read before newer ones."""
    whole = world.observed()
    forged = _revisions(whole)
    (pattern,) = [
        document
        for document in whole.replica_sets
        if document["metadata"]["labels"][cluster_model.REVISION_LABEL] == world.revision()
    ]
    marks = [document["metadata"]["labels"] for document in forged.values()]
    sets = [{"metadata": {**pattern["metadata"], "labels": mark}} for mark in marks]
    children = {**whole.children, **{(cluster_model.CONFIG_MAP, name): document for name, document in forged.items()}}
    _, read = _reading(replace(whole, children=children, replica_sets=(*whole.replica_sets, *sets)))
    assert len(set(forged) & set(read)) < 16
    assert cluster_model.revision_map_name("chat", world.revision()) in read


class _Sealed(dict[str, str]):
    """Contents that must not be read."""

    def get(self, *_: object) -> NoReturn:
        raise AssertionError("was read")

    __getitem__ = get


def _sealed(document: Object) -> Object:
    return {**document, "data": _Sealed(document["data"])}


def _revisions(whole: Observed) -> dict[str, Object]:
    """40 ConfigMaps that are labelled and named as those of revisions, newer than all others."""
    (genuine, *_) = [
        document for _, document in whole.children.items() if document["metadata"]["labels"].get(INPUTS_LABEL)
    ]
    made: dict[str, Object] = {}
    for revision in (f"forged-{number}" for number in range(40)):
        name = cluster_model.revision_map_name("chat", revision)
        labels = {**genuine["metadata"]["labels"], cluster_model.REVISION_LABEL: revision}
        own = {"name": name, "uid": name, "labels": labels, "creationTimestamp": "2027-01-01T00:00:00Z"}
        made[name] = {**genuine, "metadata": {**genuine["metadata"], **own}}
    return made


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
    """The input as watches report it: only ConfigMaps in `read` have contents."""

    def shown(document: Object) -> Object:
        if document["kind"] != cluster_model.CONFIG_MAP or document["metadata"]["name"] in read:
            return document
        return {name: value for name, value in document.items() if name not in ("data", "immutable")}

    children = {key: shown(child) for key, child in whole.children.items()}
    return replace(
        whole, children=children, profiles={name: shown(document) for name, document in whole.profiles.items()}
    )


def _ballast(whole: Observed, name: str, owner: str) -> dict[str, Object]:
    hot = whole.children[cluster_model.CONFIG_MAP, cluster_model.hot_map_name("chat")]
    owners = [{**hot["metadata"]["ownerReferences"][0], "uid": owner}]
    names = [name.format(number) for number in range(3)]
    return {
        document: {**hot, "metadata": {**hot["metadata"], "name": document, "ownerReferences": owners}}
        for document in names
    }
