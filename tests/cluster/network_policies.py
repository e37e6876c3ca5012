"""NetworkPolicies as nftables rules: a pure function of the policies, the pods and the namespaces.

The rig's nodes share one network namespace, so that one rule set serves all of them; controllers that run once for each
node would undo one another's rules there. Pods reach one another through the forward hook. A node's own traffic to its
pods (the kubelet's probes) does not pass it, so it is let through, as Kubernetes asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TABLE = "network-policies"

Object = Mapping[str, Any]
Labels = Mapping[str, str]


@dataclass(frozen=True)
class World:
    """What the API server holds: pods without an address of their own count for nothing."""

    policies: Sequence[Object]
    pods: Sequence[Object]
    namespaces: Sequence[Object]

    def addressed_pods(self) -> list[Object]:
        return [pod for pod in self.pods if _address(pod)]

    def namespace_labels(self, name: str) -> Labels:
        namespaces = (item for item in self.namespaces if item["metadata"]["name"] == name)
        return next((item["metadata"].get("labels") or {} for item in namespaces), {})


@dataclass(frozen=True)
class _Direction:
    """Ingress or egress: the names that the API and nftables have for its parts."""

    type: str
    rules: str
    peers: str
    pod_side: str
    peer_side: str


_INGRESS = _Direction("Ingress", "ingress", "from", pod_side="daddr", peer_side="saddr")
_EGRESS = _Direction("Egress", "egress", "to", pod_side="saddr", peer_side="daddr")


def ruleset(world: World) -> str:
    """A script for `nft -f` that replaces the table as a whole.

    A pod that a policy selects has a chain in which each rule returns what it allows; what reaches the end is dropped.
    Answers to what was allowed are allowed.
    """
    chains, jumps = [], []
    for direction in (_EGRESS, _INGRESS):
        for address, rules in _isolated(world, direction):
            name = f"{direction.rules}-{address}".replace(".", "-")
            chains.append(f"  chain {name} {{\n{rules}    drop\n  }}\n")
            jumps.append(f"    ip {direction.pod_side} {address} jump {name}\n")
    hook = "    type filter hook forward priority filter; policy accept;\n"
    base = f"  chain forward {{\n{hook}    ct state established,related accept\n{''.join(jumps)}  }}\n"
    return f"table ip {TABLE} {{}}\ndelete table ip {TABLE}\ntable ip {TABLE} {{\n{''.join(chains)}{base}}}\n"


def _isolated(world: World, direction: _Direction) -> Iterator[tuple[str, str]]:
    """Address and rules of each pod that is isolated in `direction`."""
    for pod in world.addressed_pods():
        policies = [policy for policy in world.policies if _isolates(policy, pod, direction)]
        if policies:
            rules = [line for policy in policies for line in _policy_lines(world, policy, pod, direction)]
            yield _address(pod), "".join(f"    {line}\n" for line in rules)


def _isolates(policy: Object, pod: Object, direction: _Direction) -> bool:
    spec = policy["spec"]
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    same = policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
    return same and direction.type in types and matches(spec.get("podSelector") or {}, _labels(pod))


def _policy_lines(world: World, policy: Object, pod: Object, direction: _Direction) -> Iterator[str]:
    for rule in policy["spec"].get(direction.rules) or []:
        for peer, peer_pods in _peers(world, policy, rule.get(direction.peers), direction):
            for port in rule.get("ports") or [None]:
                targets = [pod] if direction is _INGRESS else peer_pods
                for match in _ports(port, targets):
                    yield " ".join(filter(None, (peer, match, "return")))


def _peers(
    world: World, policy: Object, peers: Sequence[Object] | None, direction: _Direction
) -> Iterator[tuple[str, list[Object]]]:
    """A match for each peer, and the pods behind it; no peers means all."""
    if not peers:
        yield "", []
    for peer in peers or []:
        if block := peer.get("ipBlock"):
            excluded = [f"ip {direction.peer_side} != {item}" for item in block.get("except") or []]
            yield " ".join([f"ip {direction.peer_side} {block['cidr']}", *excluded]), []
        elif pods := list(_selected(world, policy["metadata"]["namespace"], peer)):
            yield f"ip {direction.peer_side} {{ {', '.join(sorted(_address(pod) for pod in pods))} }}", pods


def _selected(world: World, own_namespace: str, peer: Object) -> Iterator[Object]:
    for pod in world.addressed_pods():
        namespace = pod["metadata"]["namespace"]
        if "namespaceSelector" in peer:
            near = matches(peer["namespaceSelector"] or {}, world.namespace_labels(namespace))
        else:
            near = namespace == own_namespace
        if near and matches(peer.get("podSelector") or {}, _labels(pod)):
            yield pod


def _ports(port: Object | None, targets: Sequence[Object]) -> Iterable[str]:
    """Matches for one entry of `ports`; a name stands for what the target pods call so."""
    if port is None:
        return [""]
    protocol, number = str(port.get("protocol", "TCP")).lower(), port.get("port")
    if number is None:
        return [f"meta l4proto {protocol}"]
    if isinstance(number, str):
        return [f"{protocol} dport {item}" for item in sorted(_named_ports(number, protocol, targets))]
    last = port.get("endPort")
    return [f"{protocol} dport {number}" + (f"-{last}" if last else "")]


def _named_ports(name: str, protocol: str, targets: Sequence[Object]) -> set[int]:
    containers = (container for pod in targets for container in pod["spec"]["containers"])
    return {
        port["containerPort"]
        for container in containers
        for port in container.get("ports") or []
        if port.get("name") == name and port.get("protocol", "TCP").lower() == protocol
    }


def matches(selector: Object, labels: Labels) -> bool:
    """Whether a label selector selects; the empty one selects everything."""
    labels_selected = (selector.get("matchLabels") or {}).items()
    expressions = selector.get("matchExpressions") or []
    return all(labels.get(key) == value for key, value in labels_selected) and all(
        _holds(item, labels) for item in expressions
    )


def _holds(expression: Object, labels: Labels) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"no operator of label selectors: {expression['operator']}")


def _labels(pod: Object) -> Labels:
    return pod["metadata"].get("labels") or {}


def _address(pod: Object) -> str:
    """Empty for a pod that shares its node's address, has none yet, or has ended and given it back."""
    status = pod.get("status") or {}
    if pod["spec"].get("hostNetwork") or status.get("phase") in ("Succeeded", "Failed"):
        return ""
    return str(status.get("podIP") or "")
