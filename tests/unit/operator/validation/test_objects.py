"""Which objects are kept, and how much of them."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import outrider_operator
import pytest
from outrider_operator import kinds
from outrider_operator.cluster_model import PROFILE, REVISION_LABEL, TOO_LARGE, ServiceIdentity
from outrider_operator.decide.canary import draft_canary
from outrider_operator.decide.ownership import owner_reference
from outrider_operator.decide.profiling.profile_maps import MAX_OWNERS
from outrider_operator.validation import objects
from outrider_operator.validation.reading import InvalidInput

from tests.unit.operator.documents import document, labels, owned_by, pod, replica_set, stateful_set


@pytest.mark.parametrize(
    "kind", [kind for kind in kinds.CHILDREN if kind not in (kinds.REPLICA_SET, kinds.JOB)], ids=lambda k: k.kind
)
def test_labels_alone_make_nothing_outriders(kind: kinds.ResourceKind) -> None:
    """Any tenant can put them on anything."""
    foreign = document("foreign", 1)
    foreign["metadata"]["ownerReferences"] = []
    assert isinstance(objects.admit(kind, foreign), InvalidInput)
    foreign["metadata"]["ownerReferences"] = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "x"}]
    assert isinstance(objects.admit(kind, foreign), InvalidInput)


@pytest.mark.parametrize("kind", [kinds.REPLICA_SET, kinds.JOB], ids=lambda k: k.kind)
def test_an_orphan_that_is_about_to_be_adopted_is_kept(kind: kinds.ResourceKind) -> None:
    """A Deployment that was deleted with --cascade=orphan is created again and adopts its ReplicaSets."""
    orphan = document("orphan", 1, spec={"template": {"spec": {}}, "replicas": 1})
    orphan["metadata"]["ownerReferences"] = []
    admitted = objects.admit(kind, orphan)
    assert not isinstance(admitted, InvalidInput)
    assert admitted["spec"] == {"replicas": 1}


def test_a_profile_without_an_owner_is_kept() -> None:
    """The next service that needs it takes it; unseen, it would stand in the way of every one."""
    profile = document("outrider-profile-a", 1)
    profile["metadata"] |= {"labels": labels("chat", PROFILE), "ownerReferences": []}
    assert not isinstance(objects.admit(kinds.CONFIG_MAP, profile), InvalidInput)


@pytest.mark.parametrize(("name", "is_kept"), [("chat-5eed", True), ("chat-5eee", False)])
def test_a_revision_without_an_owner_is_kept(name: str, is_kept: bool) -> None:
    """kubectl delete --cascade=orphan, and the manifest again: unseen, it had the new service's refused for ever."""
    revision = document(name, 1)
    revision["metadata"] |= {"labels": {**labels("chat"), REVISION_LABEL: "5eed"}, "ownerReferences": []}
    assert isinstance(objects.admit(kinds.CONFIG_MAP, revision), InvalidInput) is not is_kept


def test_the_owners_kind_is_that_of_the_chain() -> None:
    assert not isinstance(objects.admit(kinds.POD, pod("pod")), InvalidInput)
    assert not isinstance(objects.admit(kinds.REPLICA_SET, replica_set()), InvalidInput)
    of_a_set = pod("pod")
    of_a_set["metadata"]["ownerReferences"] = owned_by("DaemonSet", "x")
    assert isinstance(objects.admit(kinds.POD, of_a_set), InvalidInput)


@pytest.mark.parametrize("kind", [kinds.POD, kinds.NODE, kinds.DEPLOYMENT, kinds.SERVICE], ids=lambda k: k.kind)
def test_managed_fields_are_not_kept(kind: kinds.ResourceKind) -> None:
    """They are half of an object's size, and no decision reads them."""
    sent = pod("any") if kind == kinds.POD else document("any", 1, spec={})
    sent["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    admitted = objects.admit(kind, sent)
    assert not isinstance(admitted, InvalidInput)
    assert "managedFields" not in admitted["metadata"]


def test_annotations_of_others_and_huge_ones_are_not_kept() -> None:
    sent = document("any", 1)
    sent["metadata"]["annotations"] = {
        "outrider.dev/asked": "kept",
        "outrider.dev/huge": "x" * (objects.MOST_ANNOTATIONS + 1),
        "kubectl.kubernetes.io/last-applied-configuration": "{}",
    }
    admitted = objects.admit(kinds.DEPLOYMENT, sent)
    assert not isinstance(admitted, InvalidInput)
    assert admitted["metadata"]["annotations"] == {"outrider.dev/asked": "kept"}


OF_CONTROLLERS: dict[kinds.ResourceKind, Callable[[], dict[str, Any]]] = {
    kinds.REPLICA_SET: replica_set,
    kinds.STATEFUL_SET: stateful_set,
    kinds.POD: partial(pod, "pod"),
}
OWNED_BY_ANY = [kind for kind in kinds.CHILDREN if kind not in OF_CONTROLLERS]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *((kind, "spec") for kind in kinds.CHILDREN if kind != kinds.CONFIG_MAP),
        *((kind, "ownerReferences") for kind in OWNED_BY_ANY),
    ],
    ids=str,
)
def test_what_is_too_large_for_one_of_outriders_is_not_kept(kind: kinds.ResourceKind, part: str) -> None:
    """Users can write the labels and an owner; neither their number nor the size of a Service is bounded."""
    sent = OF_CONTROLLERS[kind]() if kind in OF_CONTROLLERS else document("any", 1)
    size = objects.LARGE.get(kind, 1) * objects.MOST_OBJECT
    if part == "spec":
        sent["spec"] = {"nodeName": "x" * size, "ports": ["x" * size]}
    else:
        sent["metadata"]["ownerReferences"] *= size // 50
    admitted = objects.admit(kind, sent)
    assert isinstance(admitted, InvalidInput)
    assert admitted.reason == "TooLarge"


@pytest.mark.parametrize(
    "kind", [kinds.POD, kinds.REPLICA_SET, kinds.CONFIG_MAP, kinds.DEPLOYMENT], ids=lambda k: k.kind
)
def test_few_of_many_foreign_labels_and_owners_are_kept(kind: kinds.ResourceKind) -> None:
    """1,850 labels on a pod took 74 kB. Those that Outrider reads stay, and some for NetworkPolicies to select by."""
    sent = replica_set() if kind == kinds.REPLICA_SET else pod("pod") if kind == kinds.POD else document("chat", 1)
    ours = dict(sent["metadata"]["labels"])
    sent["metadata"]["labels"] = {f"x{number}": "y" * 63 for number in range(1850)} | ours | {"team": "red"}
    if kind in (kinds.POD, kinds.REPLICA_SET):
        sent["metadata"]["ownerReferences"] += [{"apiVersion": "v1", "kind": "Pod", "uid": str(n)} for n in range(1000)]
    admitted = objects.admit(kind, sent)
    assert not isinstance(admitted, InvalidInput)
    assert (ours | {"team": "red"}).items() <= admitted["metadata"]["labels"].items()
    assert len(json.dumps(admitted)) < 5_000


@pytest.mark.parametrize("kind", [kinds.POD, kinds.REPLICA_SET], ids=lambda k: k.kind)
def test_an_owner_that_does_not_control_makes_nothing_outriders(kind: kinds.ResourceKind) -> None:
    """A pod's further owners can be typed in by hand, and its own controller stays."""
    sent = replica_set() if kind == kinds.REPLICA_SET else pod("pod")
    sent["metadata"]["ownerReferences"] += [{"apiVersion": "apps/v1", "kind": "DaemonSet", "controller": True}]
    del sent["metadata"]["ownerReferences"][0]["controller"]
    assert isinstance(objects.admit(kind, sent), InvalidInput)


def test_every_annotation_and_label_that_is_read_is_kept() -> None:
    """It survives 400 tiny annotations of others: without its digest an object was applied for ever."""
    named = _constants()
    assert {text for name, text in named.items() if name.endswith("_LABEL")} <= objects.LABELS
    marks = {text for name, text in named.items() if name.endswith(("_ANNOTATION", "_NOTE"))}
    marks |= {f"outrider.dev/{order}" for order in draft_canary._ORDERS}
    assert marks | {named["INPUTS_LABEL"]} == objects.ANNOTATIONS
    sent = document("chat", 1)
    sent["metadata"]["annotations"] = {f"outrider.dev/x{number}": "" for number in range(400)}
    sent["metadata"]["annotations"] |= dict.fromkeys(objects.ANNOTATIONS, "x" * 100)
    admitted = objects.admit(kinds.DEPLOYMENT, sent)
    assert not isinstance(admitted, InvalidInput)
    assert set(admitted["metadata"]["annotations"]) == objects.ANNOTATIONS


def _constants() -> dict[str, str]:
    """Annotations in all modules of the operator."""
    constants: dict[str, str] = {}
    for module in pkgutil.walk_packages(outrider_operator.__path__, "outrider_operator."):
        constants |= {
            name: value for name, value in vars(importlib.import_module(module.name)).items() if name.isupper()
        }
    return {name: value for name, value in constants.items() if isinstance(value, str)}


def test_many_empty_values_are_too_large() -> None:
    """Their JSON is tiny, yet 525 such objects filled the operator's memory."""
    admitted = objects.admit(
        kinds.NETWORK_POLICY, document("any", 1, spec={"ingress": [{} for _ in range(objects.MOST_VALUES)]})
    )
    assert isinstance(admitted, InvalidInput)
    assert admitted.reason == "TooLarge"


@pytest.mark.parametrize(
    "kind",
    [kinds.DEPLOYMENT, kinds.DISRUPTION_BUDGET, kinds.KUBERNETES_SERVICE, kinds.SERVICE_ACCOUNT],
    ids=lambda k: k.kind,
)
def test_of_what_has_its_services_name_there_is_no_more_than_one(kind: kinds.ResourceKind) -> None:
    """A user with one service could name its uid as owner of any number of Deployments of 60 kB each."""
    sent = document("chat-2", 1)
    sent["metadata"]["labels"] = labels("chat")
    assert isinstance(objects.admit(kind, sent), InvalidInput)


def test_a_profile_of_as_many_owners_as_it_may_have_is_kept() -> None:
    """Each service adds itself; a profile that is too large would never be measured, and block every service."""
    profile = document("outrider-profile-a", 1)
    owners = [
        owner_reference(ServiceIdentity("x" * 40, "ns", f"{number:036}"), controller=False)
        for number in range(MAX_OWNERS)
    ]
    profile["metadata"] |= {"labels": labels(None, PROFILE), "ownerReferences": owners}
    assert not isinstance(objects.admit(kinds.CONFIG_MAP, profile), InvalidInput)


def test_a_text_is_weighed_as_it_lies_in_memory() -> None:
    """One emoji makes each character of it take four bytes."""
    admitted = objects.admit(
        kinds.CONFIG_MAP, document("profile", 1, data={"target.json": "x" * (objects.MOST_DATA // 2) + "\N{ROCKET}"})
    )
    assert not isinstance(admitted, InvalidInput)
    assert admitted["data"] == {}


def test_of_a_service_that_is_too_large_the_size_is_kept() -> None:
    """Each list and text of it is bounded, their sum is not: 600 of 900 kB would end the operator for all services."""
    huge = document("chat", 1, spec={"podTemplate": {"affinity": "x" * objects.MOST_SPEC}}, status={"replicas": 1})
    huge["metadata"]["labels"] |= {f"x{number}": "y" * 63 for number in range(1000)}
    admitted = objects.admit(kinds.SERVICE, huge)
    assert not isinstance(admitted, InvalidInput)
    assert list(admitted["spec"]) == [TOO_LARGE]
    assert admitted["status"] == {"replicas": 1}
    assert len(json.dumps(admitted)) < 1000


def test_a_service_too_large_keeps_its_scale_and_kill_switch() -> None:
    """They went with the rest, so that one long annotation froze an incident's remedy."""
    small = {"replicas": 3, "speculation": {"mode": "Off"}}
    for classes, is_kept in (([], True), (["x" * objects.MOST_PODLESS], False)):
        spec = {"podTemplate": {"affinity": "x" * objects.MOST_SPEC}, **small, "sloClasses": classes}
        admitted = objects.admit(kinds.SERVICE, document("chat", 1, spec=spec))
        assert not isinstance(admitted, InvalidInput)
        size = admitted["spec"].pop(TOO_LARGE)
        assert size > objects.MOST_SPEC
        assert admitted["spec"] == ({**small, "sloClasses": classes} if is_kept else {})


def test_of_a_config_map_nothing_but_metadata_and_texts_is_kept() -> None:
    admitted = objects.admit(
        kinds.CONFIG_MAP, document("profile", 1, data={}, binaryData={"x": "x" * objects.MOST_OBJECT})
    )
    assert not isinstance(admitted, InvalidInput)
    assert set(admitted) == {"apiVersion", "kind", "metadata", "data"}


def test_outriders_part_of_a_filled_config_map_is_kept() -> None:
    """And what is left out is counted."""
    sent = document("profile", 1, data={"target.json": "{}", "theirs": "x" * objects.MOST_DATA})
    admitted = objects.admit(kinds.CONFIG_MAP, sent)
    assert not isinstance(admitted, InvalidInput)
    assert admitted["data"] == {"target.json": "{}"}
    unfit = objects.left_out(kinds.CONFIG_MAP, admitted, sent)
    assert unfit is not None
    assert unfit.reason == "TooLarge"
    assert objects.left_out(kinds.CONFIG_MAP, admitted, admitted) is None


@pytest.mark.parametrize(("name", "is_kept"), [("chat", True), ("chat-canary", True), ("chat-canary-2", False)])
def test_a_service_has_two_deployments_at_most(name: str, is_kept: bool) -> None:
    """Its own, and that of a draft canary."""
    admitted = objects.admit(
        kinds.DEPLOYMENT, document(name, 1) | {"metadata": document(name, 1)["metadata"] | {"labels": labels()}}
    )
    assert isinstance(admitted, InvalidInput) is not is_kept
