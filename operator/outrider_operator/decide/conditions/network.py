"""What NetworkPolicies mean for a service: which of its namespace's keeps the operator from a pod."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from outrider_crds.runtime_config import ADMIN_PORT

from outrider_operator.inbound.reading import cut, items, label, mapping, name_of
from outrider_operator.model import MANAGED_BY_LABEL, MANAGER, FigureWindows, Object

_REMEDY = "let the operator's pods reach port 9000, or install the chart with servingNetworkPolicy.enabled=true"
_ADMIN_PORT_NAMES = (ADMIN_PORT, "admin", None)
"""How a policy names the port; without a name it is about all ports."""
_MOST_NAMED = 3
_MOST_CHARACTERS = 2048
"""In a condition's message."""


def why_unheard(unheard: Mapping[str, str], pods: Iterable[Object], policies: Iterable[Object]) -> str:
    """A sentence about the first pod that does not answer the operator; empty where all do.

    `unheard` holds pod names and what became of the last question; `policies` are the namespace's.
    """
    silent = next((pod for pod in pods if name_of(pod) in unheard), None)
    if silent is None:
        return ""
    said = f"Pod {name_of(silent)} does not answer the operator on port 9000: {unheard[name_of(silent)]}."
    names = sorted(name_of(policy) for policy in _in_the_way(policies, silent))
    if not names:
        return said
    return f"{said} NetworkPolicy {', '.join(names[:_MOST_NAMED])} selects it: {_REMEDY}."


def explained(figures: FigureWindows, unheard: str) -> FigureWindows:
    """Where there are no figures, also why pods are not heard."""
    if not figures.error or not unheard:
        return figures
    return replace(figures, error=cut(f"{figures.error}. {unheard}", _MOST_CHARACTERS))


def _in_the_way(policies: Iterable[Object], pod: Object) -> list[Object]:
    """Those of `policies` that keep the admin port of `pod` shut. Policies add up: what one lets in, none keeps out."""
    selecting = [policy for policy in policies if _isolates(policy, pod)]
    if any(_lets_operator_in(policy) for policy in selecting):
        return []
    return [policy for policy in selecting if not any(_is_about_admin_port(rule) for rule in _rules(policy))]


def _lets_operator_in(policy: Object) -> bool:
    """Everybody, or as the chart says: Outrider's own policy names the operator among its peers."""
    ours = label(policy, MANAGED_BY_LABEL) == MANAGER
    return any(_is_about_admin_port(rule) and (ours or not rule.get("from")) for rule in _rules(policy))


def _rules(policy: Object) -> list[Object]:
    return items(policy, "spec", "ingress")


def _is_about_admin_port(rule: Object) -> bool:
    ports = items(rule, "ports")
    return not rule.get("ports") or any(_holds_admin_port(each) for each in ports)


def _holds_admin_port(port: Object) -> bool:
    first, last = port.get("port"), port.get("endPort")
    if isinstance(first, int) and isinstance(last, int):
        return first <= ADMIN_PORT <= last
    return first in _ADMIN_PORT_NAMES


def _isolates(policy: Object, pod: Object) -> bool:
    """Does `policy` limit who may connect to `pod`?"""
    types = mapping(policy, "spec").get("policyTypes") or ["Ingress"]
    return "Ingress" in types and _selects(mapping(policy, "spec", "podSelector"), mapping(pod, "metadata", "labels"))


def _selects(selector: Object, labels: Object) -> bool:
    wanted = mapping(selector, "matchLabels")
    expressions = items(selector, "matchExpressions")
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(e, labels) for e in expressions
    )


def _holds(expression: Object, labels: Object) -> bool:
    value, values = labels.get(str(expression.get("key"))), expression.get("values") or []
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case _:
            return value is None
