"""Demand of each service as a metric, read from its status at each scrape. Unknown demand has no series."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider_operator.cluster_model import Object, read_status
from outrider_operator.validation.reading import name_of, namespace_of

NAME = "outrider_demand_replicas"
LABELS = ("outrider_namespace", "outrider_service", "product")


class ServiceDemand(Collector):
    """One series for each service and product that could serve its load at the SLO."""

    def __init__(self, services: Callable[[], Iterable[Object]]) -> None:
        self._services = services

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(NAME, "Replicas that the load of a service takes at its SLO.", labels=LABELS)
        for service in self._services():
            for demand in read_status(service).demand:
                if (replicas := _number(demand.replicas)) is not None:
                    family.add_metric((namespace_of(service), name_of(service), demand.product), replicas)
        yield family


def _number(text: str) -> float | None:
    """A finite number; None if another writer put something else into the status."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
