"""`gateway.inferencePool`: the pool follows the spec, and nothing else of the service depends on it."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_operator.cluster_model import (
    DEPLOYMENT,
    INFERENCE_POOL,
    KUBERNETES_SERVICE,
    NETWORK_POLICY,
    SERVING,
    ApiRefusal,
    KindAccess,
    Object,
)
from outrider_operator.decide import decide
from outrider_operator.plan import Delete, fingerprint

from tests.unit.operator.decide.world import SETTINGS, World, manifest, settings_with

ON: dict[str, Any] = {"gateway": {"inferencePool": True}}
OPERATOR = {"podSelector": {"matchLabels": {"app": "outrider"}}}


def picker(name: str = "chat-epp") -> Object:
    """The endpoint picker's Service, as its own chart makes it."""
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": {}}
    return {"apiVersion": "v1", "kind": KUBERNETES_SERVICE, "metadata": metadata, "spec": {"selector": {"app": "epp"}}}


def foreign_pool() -> Object:
    metadata = {"name": "chat", "namespace": "default", "uid": "uid-pool", "labels": {}}
    return {"kind": INFERENCE_POOL, "metadata": metadata, "spec": {"targetPorts": [{"number": 80}]}}


def test_pool_selects_the_pods_and_names_the_picker() -> None:
    """The schema of v1; a pool of before v1.6 must name a picker."""
    world = World(manifest(**ON)).settled()
    pool = world.objects[INFERENCE_POOL, "chat"]
    assert pool["spec"] == {
        "selector": {"matchLabels": world.deployment()["spec"]["selector"]["matchLabels"]},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": "chat-epp",
            "port": {"number": 9002},
            "failureMode": "FailOpen",
        },
    }
    assert pool["metadata"]["ownerReferences"][0]["uid"] == "uid-chat"
    assert world.reason(C.INFERENCE_POOL_READY) == "Unknown/NotAttached"
    assert "There is no Service chat-epp" in world.condition(C.INFERENCE_POOL_READY).message


def test_another_picker_changes_the_pool_and_no_pod() -> None:
    world = World(manifest(**ON)).served()
    before = world.revision()
    world.objects[KUBERNETES_SERVICE, "chat-epp"] = picker()
    world.change(gateway={"inferencePool": True, "endpointPicker": "pickers"})
    assert world.objects[INFERENCE_POOL, "chat"]["spec"]["endpointPickerRef"]["name"] == "pickers"
    assert world.revision() == before


def test_pool_goes_when_it_is_switched_off() -> None:
    world = World(manifest(**ON)).settled()
    world.change(gateway={"inferencePool": False})
    assert (INFERENCE_POOL, "chat") not in world.objects
    assert world.reason(C.INFERENCE_POOL_READY) == "Unknown/NotRequested"


def test_pool_of_a_refused_spec_is_awaited_until_it_is_gone() -> None:
    """The condition said NotRequested while the pool was there, and then no look found it."""
    world = World(manifest(**ON)).served()
    world.change(gateway={"inferencePool": False}, podTemplate={"hostNetwork": True})
    assert world.reason(C.SPEC_VALID) == "False/InvalidSpec"
    assert (INFERENCE_POOL, "chat") in world.objects, "nothing is deleted for a refused spec"
    assert world.reason(C.INFERENCE_POOL_READY) == "Unknown/Pending"
    world.change(podTemplate={})
    assert (INFERENCE_POOL, "chat") not in world.objects
    assert world.reason(C.INFERENCE_POOL_READY) == "Unknown/NotRequested"


def test_pool_whose_deletion_is_refused_is_named() -> None:
    world = World(manifest(**ON)).settled()
    world.patch(gateway={"inferencePool": False})
    (delete,) = decide(world.observed(), SETTINGS).delete
    assert isinstance(delete, Delete)
    world.refusals = (ApiRefusal(INFERENCE_POOL, "chat", SERVING, "pools are protected", fingerprint(delete)),)
    world.settle()
    assert world.reason(C.INFERENCE_POOL_READY) == "Unknown/Pending"
    assert "pools are protected" in world.condition(C.INFERENCE_POOL_READY).message
    assert world.reason(C.SPEC_VALID) == "True/Accepted"


def test_pool_with_a_finalizer_is_awaited() -> None:
    world = World(manifest(**ON)).settled()
    world.objects[INFERENCE_POOL, "chat"]["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    world.change(gateway={"inferencePool": False})
    assert world.reason(C.INFERENCE_POOL_READY) == "Unknown/Pending"


def test_pool_that_may_not_be_looked_for_may_be_left() -> None:
    world = World(manifest(**ON)).settled()
    world.patch(gateway={"inferencePool": False})
    world.pool_access = KindAccess.FORBIDDEN
    del world.objects[INFERENCE_POOL, "chat"]  # what is forbidden is not seen
    world.settle()
    assert world.reason(C.INFERENCE_POOL_READY) == "Unknown/Pending"


def test_foreign_pool_without_a_request_is_no_concern() -> None:
    world = World(manifest())
    world.objects[INFERENCE_POOL, "chat"] = foreign_pool()
    world.settle()
    assert world.reason(C.INFERENCE_POOL_READY) == "Unknown/NotRequested"


def test_foreign_pool_of_the_name_is_left_alone() -> None:
    """Two routes would fight over it; the service itself comes up."""
    world = World(manifest(**ON))
    world.objects[INFERENCE_POOL, "chat"] = foreign_pool()
    world.serve()
    assert world.objects[INFERENCE_POOL, "chat"] == foreign_pool()
    assert world.reason(C.INFERENCE_POOL_READY) == "False/NameConflict"
    assert "InferencePool chat was not made by Outrider" in world.condition(C.INFERENCE_POOL_READY).message
    assert [world.reason(kind) for kind in (C.SPEC_VALID, C.READY, C.UPDATED)] == [
        "True/Accepted", "True/EndpointReady", "True/UpToDate",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("access", "reason", "words"),
    [
        (KindAccess.NOT_INSTALLED, "False/NotInstalled", "install its CRDs"),
        (KindAccess.FORBIDDEN, "False/ChildRejected", "install the chart"),
    ],
)
def test_cluster_without_the_extension_serves_on(access: KindAccess, reason: str, words: str) -> None:
    """The pool is made once the extension is there."""
    world = World(manifest(**ON))
    world.pool_access = access
    plan = world.serve()
    assert (INFERENCE_POOL, "chat") not in world.objects
    assert world.reason(C.INFERENCE_POOL_READY) == reason
    assert words in world.condition(C.INFERENCE_POOL_READY).message
    assert world.reason(C.READY) == "True/EndpointReady"
    assert plan.requeue_after_s is not None, "no watch tells of the extension"
    world.pool_access = KindAccess.SERVED
    world.settle()
    assert world.reason(C.INFERENCE_POOL_READY) == "Unknown/NotAttached"


def test_refused_pool_is_named_and_holds_nothing_up() -> None:
    """A policy against gateways is no reason for a service not to roll out."""
    world = World(manifest(**ON))
    world.refuse(lambda document: document["kind"] == INFERENCE_POOL, "no pools here")
    world.serve()
    assert world.reason(C.INFERENCE_POOL_READY) == "False/ChildRejected"
    assert "no pools here" in world.condition(C.INFERENCE_POOL_READY).message
    assert world.reason(C.SPEC_VALID) == "True/Accepted"
    assert (DEPLOYMENT, "chat") in world.objects


def test_picker_may_read_the_metrics_under_the_policy() -> None:
    """It chooses by them; without them all pods look alike to it."""
    world = World(manifest(**ON), settings=settings_with(admin_port_peers=(OPERATOR,))).settled()

    def peers() -> list[Object]:
        rules = world.objects[NETWORK_POLICY, "chat-admin-port"]["spec"]["ingress"]
        return [peer for rule in rules for peer in rule.get("from", [])]

    assert peers() == [OPERATOR]
    world.objects[KUBERNETES_SERVICE, "chat-epp"] = picker()
    world.settle()
    assert peers() == [OPERATOR, {"podSelector": {"matchLabels": {"app": "epp"}}}]
    world.change(gateway={"inferencePool": False})
    assert peers() == [OPERATOR]


def test_no_policy_is_made_for_the_picker_alone() -> None:
    """It would close the port to all others."""
    world = World(manifest(**ON))
    world.objects[KUBERNETES_SERVICE, "chat-epp"] = picker()
    world.settle()
    assert not [key for key in world.objects if key[0] == NETWORK_POLICY]


ACCEPTED = {"type": "Accepted", "status": "True", "observedGeneration": 1}
RESOLVED = {"type": "ResolvedRefs", "status": "True", "observedGeneration": 1}
UNRESOLVED = {**RESOLVED, "status": "False", "message": "Service chat-epp has no endpoints"}


@pytest.mark.parametrize(
    ("parents", "reason", "words"),
    [
        ([], "Unknown/NotAttached", "HTTPRoute"),
        ([{"parentRef": {"kind": "Status", "name": "default"}}], "Unknown/NotAttached", "HTTPRoute"),
        ([{"parentRef": {"name": "inner"}, "conditions": [ACCEPTED, RESOLVED]}], "True/PoolCurrent", "Gateway inner"),
        ([{"parentRef": {"name": "inner"}, "conditions": [ACCEPTED, UNRESOLVED]}], "False/NotAccepted", "no endpoints"),
        ([{"parentRef": {"name": "inner"}, "conditions": []}], "False/NotAccepted", "not accepted the pool yet"),
        ([{"parentRef": "odd", "conditions": "odd"}, "odd"], "False/NotAccepted", "not accepted the pool yet"),
    ],
)
def test_pool_is_ready_once_each_gateway_accepts_it(parents: list[Any], reason: str, words: str) -> None:
    """A pool that was written counted as ready, whatever the gateway said of it."""
    world = World(manifest(**ON)).settled()
    world.objects[INFERENCE_POOL, "chat"]["status"] = {"parents": parents}
    world.settle()
    assert world.reason(C.INFERENCE_POOL_READY) == reason
    assert words in world.condition(C.INFERENCE_POOL_READY).message


def test_pool_is_not_ready_before_gateways_see_a_change() -> None:
    world = World(manifest(**ON)).settled()
    pool = world.objects[INFERENCE_POOL, "chat"]
    pool["metadata"]["generation"] = 2
    pool["status"] = {"parents": [{"parentRef": {"name": "inner"}, "conditions": [ACCEPTED, RESOLVED]}]}
    world.settle()
    assert world.reason(C.INFERENCE_POOL_READY) == "False/NotAccepted"
