"""A service's NetworkPolicy, and the sentence about a pod that does not answer the operator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_operator.cluster_model import NETWORK_POLICY, Object, ServiceIdentity
from outrider_operator.decide.ownership import labels, owner_reference
from outrider_operator.decide.pods.unreachable_pods import why_unreachable
from outrider_operator.decide.workloads.children import network_policy
from outrider_operator.figure_windows import FigureWindows

from tests.unit.operator.decide.world import SETTINGS, World, manifest, settings_with

POD = {"metadata": {"name": "chat-1", "labels": {"outrider.dev/component": "serving", "team": "red"}}}
SILENT = {"chat-1": "no whole answer within 2.0 s"}


def policy(name: str, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"podSelector": {}, **spec}}


def test_a_pod_that_answers_is_not_spoken_of() -> None:
    """However many policies there are."""
    assert why_unreachable({}, [POD], [policy("default-deny")]) == ""
    assert why_unreachable({"other": "x"}, [POD], [policy("default-deny")]) == ""


def test_policies_that_select_the_pod_are_named_with_a_remedy() -> None:
    """A namespace that denies by default should be named as the reason."""
    said = why_unreachable(
        SILENT, [POD], [policy("z-other"), policy("default-deny", policyTypes=["Ingress", "Egress"])]
    )
    assert said == (
        "Pod chat-1 does not answer the operator on port 9000: no whole answer within 2.0 s. "
        "NetworkPolicy default-deny, z-other selects it: let the operator's pods reach port 9000, "
        "or install the chart with servingNetworkPolicy.enabled=true."
    )


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"policyTypes": ["Egress"]}, False),
        ({"podSelector": {"matchLabels": {"team": "red"}}}, True),
        ({"podSelector": {"matchLabels": {"team": "blue"}}}, False),
        ({"podSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["red"]}]}}, True),
        ({"podSelector": {"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["red"]}]}}, False),
        ({"podSelector": {"matchExpressions": [{"key": "team", "operator": "Exists"}]}}, True),
        ({"podSelector": {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}}, False),
    ],
)
def test_only_policies_that_isolate_this_pod_are_named(spec: dict[str, Any], named: bool) -> None:
    """A policy on egress, or on other pods, is not in the way."""
    assert ("NetworkPolicy p selects it" in why_unreachable(SILENT, [POD], [policy("p", **spec)])) is named


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ({}, []),  # all peers, on every port
        ({"ports": [{"port": 9000}]}, []),
        ({"ports": [{"port": 8000, "endPort": 9999}]}, []),
        ({"ports": [{"port": "admin"}]}, []),
        ({"ports": [{"port": 8000}]}, ["deny", "p"]),
        ({"ports": [{"port": 9001, "endPort": 9999}]}, ["deny", "p"]),
        # Its peers are unknown; it does not keep others out.
        ({"ports": [{"port": 9000}], "from": [{"podSelector": {"matchLabels": {"app": "monitoring"}}}]}, ["deny"]),
    ],
    ids=str,
)
def test_a_policy_that_lets_the_port_in_is_not_blamed(rule: dict[str, Any], named: list[str]) -> None:
    """Policies add up: if one admits all peers, the pod does not answer for another reason."""
    said = why_unreachable(SILENT, [POD], [policy("p", ingress=[rule]), policy("deny")])
    assert [name for name in ("deny", "p") if f"{name} selects it" in said or f"{name}, " in said] == named


def test_outriders_own_policy_is_not_blamed() -> None:
    """It lets the operator in, whatever the namespace denies: the pod answered HTTP 500, and the condition named it."""
    pod = {"metadata": {"name": "chat-1", "labels": labels("chat")}}
    own = network_policy(ServiceIdentity("chat", "default", "uid"), PEERS)
    said = why_unreachable({"chat-1": "HTTP status 500"}, [pod], [own, policy("default-deny")])
    assert said == "Pod chat-1 does not answer the operator on port 9000: HTTP status 500."


def _policies(world: World) -> list[Object]:
    return [document for (kind, _), document in world.objects.items() if kind == NETWORK_POLICY]


PEERS: tuple[Object, ...] = ({"podSelector": {"matchLabels": {"app": "operator"}}},)


def test_service_gets_a_network_policy_only_by_the_charts_value() -> None:
    """The admin port is open to the peers, the serving port to all. The policy goes when the chart disables it."""
    world = World(manifest(), settings=settings_with(admin_port_peers=PEERS)).settled()
    (policy,) = _policies(world)
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert (
        policy["spec"]["podSelector"]["matchLabels"].items()
        <= world.deployment()["spec"]["template"]["metadata"]["labels"].items()
    )
    serving, admin = policy["spec"]["ingress"]
    assert serving == {"ports": [{"protocol": "TCP", "port": 8000}]}
    assert admin == {"from": list(PEERS), "ports": [{"protocol": "TCP", "port": 9000}]}
    world.settings = SETTINGS
    world.settle()
    assert _policies(world) == []


def test_a_changed_policy_is_restored() -> None:
    """It is restored like every child."""
    world = World(manifest(), settings=settings_with(admin_port_peers=PEERS)).settled()
    (policy,) = _policies(world)
    policy["spec"]["ingress"] = []
    world.settle()
    assert len(_policies(world)[0]["spec"]["ingress"]) == 2


def test_a_tenants_own_policy_of_that_name_is_left_alone() -> None:
    """Neither taken over, nor removed when the chart asks for none."""
    world = World(manifest(), settings=settings_with(admin_port_peers=PEERS))
    theirs = {
        "kind": NETWORK_POLICY,
        "metadata": {"name": "chat-admin-port", "uid": "theirs"},
        "spec": {"podSelector": {}},
    }
    world.objects[NETWORK_POLICY, "chat-admin-port"] = copy.deepcopy(theirs)
    world.reconcile()
    world.settings = SETTINGS
    world.reconcile()
    assert world.objects[NETWORK_POLICY, "chat-admin-port"] == theirs


def test_a_policy_of_another_service_is_a_name_conflict() -> None:
    """Decisions see it and leave it alone: without a word the pods would stay open, or shut to the operator. It is in
    no way of others if the chart disables it."""
    world = World(manifest(), settings=settings_with(admin_port_peers=PEERS))
    owner = owner_reference(ServiceIdentity("other", "default", "uid-other"), controller=True)
    metadata = {"name": "chat-admin-port", "uid": "theirs", "labels": labels("chat"), "ownerReferences": [owner]}
    world.objects[NETWORK_POLICY, "chat-admin-port"] = {"kind": NETWORK_POLICY, "metadata": metadata}
    world.settle()
    assert world.reason(C.SPEC_VALID) == "False/NameConflict"
    assert "NetworkPolicy chat-admin-port belongs to SpeculativeService other" in world.condition(C.SPEC_VALID).message
    world.settings = SETTINGS
    world.settle()
    assert world.reason(C.SPEC_VALID) == "True/Accepted"
    assert world.objects[NETWORK_POLICY, "chat-admin-port"]["metadata"] == metadata


def test_conditions_say_why_a_pods_report_does_not_arrive() -> None:
    """Updated and GoodputHealthy; the pod is ready, since the kubelet reaches it."""
    world = World(manifest()).settled()
    world.roll_out()
    (pod,) = world.pods
    world.unreachable = {pod: "no answer within 2.0 s"}
    world.network_policies = (policy("default-deny"),)
    world.figures = FigureWindows(error="none of the 1 ready pods answers on its state endpoint")
    world.settle()
    for kind, reason in ((C.UPDATED, "ConfigPending"), (C.GOODPUT_HEALTHY, "MetricsUnavailable")):
        condition = world.condition(kind)
        assert condition.reason == reason
        assert "NetworkPolicy default-deny selects it" in condition.message
    assert world.condition(C.READY).status == "True"
