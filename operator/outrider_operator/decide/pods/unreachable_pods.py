"""Find the NetworkPolicy that keeps the operator from reaching a pod's admin port."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from outrider_crds.runtime_config import ADMIN_PORT

from outrider_operator.cluster_model import MANAGED_BY_LABEL, MANAGER, Object
from outrider_operator.figure_windows import FigureWindows
from outrider_operator.validation.reading import cut, items, label, mapping, name_of

_REMEDY = "let the operator's pods reach port 9000, or install the chart with servingNetworkPolicy.enabled=true"
_ADMIN_PORT_NAMES = (ADMIN_PORT, "admin", None)
"""Values by which a policy rule names the admin port; None means all ports."""
_MOST_NAMED = 3
_MOST_CHARACTERS = 2048
"""Characters of a condition's message."""


def why_unreachable(unreachable: Mapping[str, str], pods: Iterable[Object], policies: Iterable[Object]) -> str:
    """A sentence about the first pod that does not answer the operator; empty if all do.

    unreachable: pod name -> error of the last poll. policies: NetworkPolicies of the namespace.
    """
    first = next((pod for pod in pods if name_of(pod) in unreachable), None)
    if first is None:
        return ""
    sentence = f"Pod {name_of(first)} does not answer the operator on port 9000: {unreachable[name_of(first)]}."
    names = sorted(name_of(policy) for policy in _in_the_way(policies, first))
    if not names:
        return sentence
    return f"{sentence} NetworkPolicy {', '.join(names[:_MOST_NAMED])} selects it: {_REMEDY}."


def explained(figures: FigureWindows, pod_sentence: str) -> FigureWindows:
    """`figures`, with the reason why pods cannot be polled added to their error, if they have one."""
    if not figures.error or not pod_sentence:
        return figures
    return replace(figures, error=cut(f"{figures.error}. {pod_sentence}", _MOST_CHARACTERS))


def _in_the_way(policies: Iterable[Object], pod: Object) -> list[Object]:
    """The policies that close the admin port of `pod`. Policies add up: what one allows, no other forbids."""
    selecting = [policy for policy in policies if _isolates(policy, pod)]
    if any(_lets_operator_in(policy) for policy in selecting):
        return []
    return [policy for policy in selecting if not any(_is_about_admin_port(rule) for rule in _rules(policy))]


def _lets_operator_in(policy: Object) -> bool:
    """Does `policy` admit the operator: all peers, or, in Outrider's own policy, those that the chart names?"""
    ours = label(policy, MANAGED_BY_LABEL) == MANAGER
    return any(_is_about_admin_port(rule) and (ours or not rule.get("from")) for rule in _rules(policy))


def _rules(policy: Object) -> list[Object]:
    return items(policy, "spec", "ingress")


def _is_about_admin_port(rule: Object) -> bool:
    ports = items(rule, "ports")
    return not rule.get("ports") or any(_holds_admin_port(port) for port in ports)


def _holds_admin_port(port: Object) -> bool:
    first, last = port.get("port"), port.get("endPort")
    if isinstance(first, int) and isinstance(last, int):
        return first <= ADMIN_PORT <= last
    return first in _ADMIN_PORT_NAMES


def _isolates(policy: Object, pod: Object) -> bool:
    """Does `policy` limit connections to `pod`?"""
    types = mapping(policy, "spec").get("policyTypes") or ["Ingress"]
    return "Ingress" in types and _selects(mapping(policy, "spec", "podSelector"), mapping(pod, "metadata", "labels"))


def _selects(selector: Object, labels: Object) -> bool:
    match_labels = mapping(selector, "matchLabels")
    expressions = items(selector, "matchExpressions")
    return all(labels.get(key) == value for key, value in match_labels.items()) and all(
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
