"""What the test rig makes of a NetworkPolicy; that the kernel agrees is tested on the cluster itself."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

from tests.cluster.network_policies import TABLE, World, matches, ruleset

NAMESPACES = [
    {"metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name, "team": team}}}
    for name, team in (("a", "red"), ("b", "blue"))
]


def pod(namespace: str, name: str, address: str, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    port = {"name": "admin", "containerPort": 9000}
    return {
        "metadata": {"namespace": namespace, "name": name, "labels": labels or {"app": name}},
        "spec": {"containers": [{"ports": [port]}], **spec},
        "status": {"podIP": address, "phase": "Running"},
    }


PODS = [
    pod("a", "web", "10.0.0.1"),
    pod("a", "near", "10.0.0.2"),
    pod("b", "far", "10.0.0.3"),
    pod("a", "node", "10.0.0.4", {"app": "web"}, hostNetwork=True),
]


def rules(**spec: Any) -> list[str]:
    """The lines of web's chain, without the drop at its end."""
    policy = {"metadata": {"namespace": "a", "name": "p"}, "spec": {"podSelector": {}, **spec}}
    script = ruleset(World([policy], PODS, NAMESPACES))
    chain = script.partition("-10-0-0-1 {\n")[2].partition("  }\n")[0]
    return [line.strip() for line in chain.splitlines()][:-1]


def test_without_a_policy_nothing_is_dropped() -> None:
    """A cluster that asks for nothing gets a table without a drop."""
    assert "drop" not in ruleset(World([], PODS, NAMESPACES))


def test_default_deny_isolates_pods_of_its_namespace_alone() -> None:
    """Not another namespace's, and not one that has its node's address."""
    policy = {"metadata": {"namespace": "a", "name": "deny"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}
    script = ruleset(World([policy], PODS, NAMESPACES))
    assert script.count("drop") == 2
    assert "ip daddr 10.0.0.1 jump ingress-10-0-0-1" in script
    assert "ip daddr 10.0.0.2 jump ingress-10-0-0-2" in script


@pytest.mark.parametrize(
    ("rule", "lines"),
    [
        ({}, ["return"]),
        ({"ports": [{"port": 8000}]}, ["tcp dport 8000 return"]),
        ({"ports": [{"port": "admin"}]}, ["tcp dport 9000 return"]),
        ({"ports": [{"port": "other"}]}, []),
        ({"ports": [{"port": 1, "endPort": 9, "protocol": "UDP"}]}, ["udp dport 1-9 return"]),
        ({"ports": [{"protocol": "SCTP"}]}, ["meta l4proto sctp return"]),
        ({"from": [{"podSelector": {"matchLabels": {"app": "near"}}}]}, ["ip saddr { 10.0.0.2 } return"]),
        ({"from": [{"podSelector": {"matchLabels": {"app": "far"}}}]}, []),
        ({"from": [{"namespaceSelector": {"matchLabels": {"team": "blue"}}}]}, ["ip saddr { 10.0.0.3 } return"]),
        ({"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "none"}}}]}, []),
        (
            {"from": [{"ipBlock": {"cidr": "10.0.0.0/24", "except": ["10.0.0.8/29"]}}]},
            ["ip saddr 10.0.0.0/24 ip saddr != 10.0.0.8/29 return"],
        ),
    ],
)
def test_a_rule_allows_what_it_names(rule: dict[str, Any], lines: list[str]) -> None:
    """The semantics of networking.k8s.io/v1, rule by rule."""
    assert rules(ingress=[rule]) == lines


def test_egress_names_the_ports_of_the_pods_it_goes_to() -> None:
    """A named port is the target's name for it."""
    to_far = {"to": [{"namespaceSelector": {"matchLabels": {"team": "blue"}}}], "ports": [{"port": "admin"}]}
    assert rules(policyTypes=["Egress"], egress=[to_far]) == ["ip daddr { 10.0.0.3 } tcp dport 9000 return"]


@pytest.mark.parametrize(
    ("operator", "values", "selected"),
    [("In", ["x"], True), ("NotIn", ["x"], False), ("Exists", [], True), ("DoesNotExist", [], False)],
)
def test_selectors_know_all_four_operators(operator: str, values: list[str], selected: bool) -> None:
    """They match labels as everywhere else in Kubernetes."""
    expression = {"key": "k", "operator": operator, "values": values}
    assert matches({"matchExpressions": [expression]}, {"k": "x"}) is selected


def test_nft_accepts_the_script() -> None:
    """A script that nft refuses would leave the old rules in force."""
    nft = shutil.which("nft")
    if nft is None:
        pytest.skip("there is no nft on the PATH")
    every = {"from": [{"podSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/24", "except": ["10.0.0.8/29"]}}]}
    ports = [{"port": 1, "endPort": 9}, {"protocol": "SCTP"}, {"port": "admin"}]
    policy = {
        "metadata": {"namespace": "a", "name": "p"},
        "spec": {
            "podSelector": {}, "policyTypes": ["Ingress", "Egress"],
            "ingress": [{**every, "ports": ports}], "egress": [{}],
        },
    }  # fmt: skip
    script = ruleset(World([policy], PODS, NAMESPACES))
    done = subprocess.run([nft, "--check", "-f", "-"], input=script, capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr:
        pytest.skip("nft needs root")
    assert done.returncode == 0, done.stderr
    assert TABLE in script
