"""Statuses of services as metrics, read from the cache at each scrape: conditions, draft canaries and demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider_operator.cluster_model import Object, read_status
from outrider_operator.validation.reading import name_of, namespace_of

# The labels `namespace` and `service` are not used: a scrape sets them to those of the operator's own pod.
OWNER_LABELS = ("outrider_namespace", "outrider_service")
CONDITION, CONDITION_LABELS = "outrider_service_condition", (*OWNER_LABELS, "type", "status", "reason")
PHASE, REQUESTS = "outrider_service_rollout", "outrider_service_rollout_requests"
GAIN = "outrider_service_rollout_gain"
DEMAND, DEMAND_LABELS = "outrider_demand_replicas", (*OWNER_LABELS, "product")
_FAMILIES = {
    CONDITION: ("A condition of a SpeculativeService, with its status and reason.", CONDITION_LABELS),
    PHASE: ("Always 1; phase of a service's draft canary.", (*OWNER_LABELS, "phase", "cause")),
    REQUESTS: ("Finished requests of the arm with fewer.", OWNER_LABELS),
    GAIN: ("Candidate's speed-up / stable's - 1.", OWNER_LABELS),
    DEMAND: ("Replicas that the load of a service takes at its SLO.", DEMAND_LABELS),
}
Sample = tuple[str, tuple[str, ...], float]
"""(metric, values of the labels after the service's, value)"""


class ServiceStatusMetrics(Collector):
    """Series of each service: one for each condition, whose value is always 1 and whose status and reason are labels,
    those of its last draft canary, and one for each product that could serve its load at the SLO."""

    def __init__(self, services: Callable[[], Iterable[Object]]) -> None:
        self._services = services

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families = {name: GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in _FAMILIES.items()}
        for service in self._services():
            for name, labels, value in _samples(service):
                families[name].add_metric((namespace_of(service), name_of(service), *labels), value)
        yield from families.values()


def _samples(service: Object) -> Iterator[Sample]:
    """The samples of one service. A figure that is not known has none."""
    status = read_status(service)
    for condition in status.conditions:
        yield CONDITION, (condition.type.value, condition.status.value, condition.reason), 1
    for demand in status.demand:
        if (replicas := _number(demand.replicas)) is not None:
            yield DEMAND, (demand.product,), replicas
    if (rollout := status.rollout) is not None and rollout.phase:
        yield PHASE, (rollout.phase, rollout.cause), 1
        yield REQUESTS, (), rollout.requests
        if (gain := _number(rollout.gain_percent)) is not None:
            yield GAIN, (), gain / 100


def _number(text: str) -> float | None:
    """A finite number; None if another writer put something else into the status."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
