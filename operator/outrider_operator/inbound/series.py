"""What Prometheus answers: the values were exported by tenants' pods, with labels of their choice.

The label `namespace` is the scrape's own: Prometheus puts it over a label of that name that a pod exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider_operator.inbound.states import LEAST_DIGITS, MOST_COUNT

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
    """The series that carry a service's labels and those in `needs`, with a value that a counter can have.

    Others are left out: NaN is no increase known, and one pod's nonsense must not cost the others their figures. So are
    those of a pod that speaks for a service of another namespace than its own.
    """
    for found in vector:
        labels, value = found.get("metric") or {}, _number(found.get("value"))
        if value is None or not all(labels.get(name) for name in (*SERVICE_LABELS, *needs)):
            continue
        if labels[SCRAPED_NAMESPACE] == labels[CLAIMED_NAMESPACE]:
            yield Series(labels[SCRAPED_NAMESPACE], labels[SERVICE], labels, value)


def bucket(text: str) -> float | None:
    """The upper bound that a histogram's label `le` names."""
    try:
        return float(text)
    except ValueError:
        return None


def _number(pair: Any) -> float | None:
    """The value of a (time, text) pair."""
    try:
        value = float(pair[1])
    except (TypeError, ValueError, LookupError):
        return None
    return round(value, LEAST_DIGITS) if 0 <= value <= MOST_COUNT else None
