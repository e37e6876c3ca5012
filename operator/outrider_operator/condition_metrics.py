"""Every service's conditions as a metric, read from the cache at each scrape: a service that is gone has no series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider_operator.inbound.reading import name_of, namespace_of
from outrider_operator.model import Object, read_status

NAME = "outrider_service_condition"
# Not `namespace` and `service`: a scrape gives those to the operator's own pod.
LABELS = ("outrider_namespace", "outrider_service", "type", "status", "reason")


class ServiceConditions(Collector):
    """One series for each condition of each service, always 1: its status and reason are labels."""

    def __init__(self, services: Callable[[], Iterable[Object]]) -> None:
        self._services = services

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            NAME, "A condition of a SpeculativeService, with its status and reason.", labels=LABELS
        )
        for service in self._services():
            for condition in _conditions(service):
                family.add_metric((namespace_of(service), name_of(service), *condition), 1)
        yield family


def _conditions(service: Object) -> Iterable[tuple[str, str, str]]:
    """Type, status, reason."""
    return ((each.type.value, each.status.value, each.reason) for each in read_status(service).conditions)
