"""Validate series that Prometheus returns. Tenants' pods exported them, with values and labels of their choice.

Only the label `namespace` can be trusted: Prometheus sets it at the scrape, and overwrites one that a pod exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider_operator.validation.states import LEAST_DIGITS, MOST_COUNT

SCRAPED_NAMESPACE, CLAIMED_NAMESPACE, SERVICE = "namespace", "outrider_namespace", "outrider_service"
SERVICE_LABELS = (SCRAPED_NAMESPACE, CLAIMED_NAMESPACE, SERVICE)


@dataclass(frozen=True)
class Series:
    """One series of an instant vector that belongs to a service."""

    namespace: str
    service: str
    labels: Mapping[str, str]
    value: float


def read_series(vector: Iterable[Mapping[str, Any]], needs: Iterable[str] = ()) -> Iterator[Series]:
    """The series that have a service's labels, the labels in `needs`, and a value that a counter can have.

    Others are left out, so that a faulty pod does not spoil the figures of other pods. So are series of a pod that
    claims to belong to a service of another namespace.
    """
    for sample in vector:
        labels, value = sample.get("metric") or {}, _number(sample.get("value"))
        if value is None or not all(labels.get(name) for name in (*SERVICE_LABELS, *needs)):
            continue
        if labels[SCRAPED_NAMESPACE] == labels[CLAIMED_NAMESPACE]:
            yield Series(labels[SCRAPED_NAMESPACE], labels[SERVICE], labels, value)


def bucket(text: str) -> float | None:
    """Upper bound in a histogram's label `le`; None if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def _number(pair: Any) -> float | None:
    """Value of a (time, text) pair; None if a counter cannot have it."""
    try:
        value = float(pair[1])
    except (TypeError, ValueError, LookupError):
        return None
    return round(value, LEAST_DIGITS) if 0 <= value <= MOST_COUNT else None
