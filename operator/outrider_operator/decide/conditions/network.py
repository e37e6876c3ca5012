"""What NetworkPolicies mean for a service: which of its namespace's keeps the operator from a pod."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from outrider_operator.inbound.reading import cut, items, mapping, name_of
from outrider_operator.model import FigureWindows, Object

_REMEDY = "let the operator's pods reach port 9000, or install the chart with servingNetworkPolicy.enabled=true"
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
    names = sorted(name_of(policy) for policy in policies if _isolates(policy, silent))
    if not names:
        return said
    return f"{said} NetworkPolicy {', '.join(names[:_MOST_NAMED])} selects it: {_REMEDY}."


def explained(figures: FigureWindows, unheard: str) -> FigureWindows:
    """Where there are no figures, also why pods are not heard."""
    if not figures.error or not unheard:
        return figures
    return replace(figures, error=cut(f"{figures.error}. {unheard}", _MOST_CHARACTERS))


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
