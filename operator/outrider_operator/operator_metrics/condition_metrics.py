"""Conditions and draft canaries of services as metrics. They are read from the cache at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider_operator.cluster_model import Object, read_status
from outrider_operator.validation.reading import name_of, namespace_of

NAME = "outrider_service_condition"
# The labels `namespace` and `service` are not used: a scrape sets them to those of the operator's own pod.
LABELS = ("outrider_namespace", "outrider_service", "type", "status", "reason")
PHASE, REQUESTS = "outrider_service_rollout", "outrider_service_rollout_requests"
GAIN = "outrider_service_rollout_gain"
_PHASE_LABELS = (*LABELS[:2], "phase", "cause")


class ServiceConditions(Collector):
    """Series of each service: one for each condition, whose value is always 1 and whose status and reason are labels,
    and those of its last draft canary."""

    def __init__(self, services: Callable[[], Iterable[Object]]) -> None:
        self._services = services

    def collect(self) -> Iterator[GaugeMetricFamily]:
        help_text = "A condition of a SpeculativeService, with its status and reason."
        conditions = GaugeMetricFamily(NAME, help_text, labels=LABELS)
        phases = GaugeMetricFamily(PHASE, "Always 1; phase of a service's draft canary.", labels=_PHASE_LABELS)
        requests = GaugeMetricFamily(REQUESTS, "Finished requests of the arm with fewer.", labels=LABELS[:2])
        gains = GaugeMetricFamily(GAIN, "Candidate's speed-up / stable's - 1.", labels=LABELS[:2])
        for service in self._services():
            status, owner = read_status(service), (namespace_of(service), name_of(service))
            for condition in status.conditions:
                conditions.add_metric((*owner, condition.type.value, condition.status.value, condition.reason), 1)
            if (rollout := status.rollout) is None or not rollout.phase:
                continue
            phases.add_metric((*owner, rollout.phase, rollout.cause), 1)
            requests.add_metric(owner, rollout.requests)
            if (gain := _number(rollout.gain_percent)) is not None:
                gains.add_metric(owner, gain / 100)
        yield from (conditions, phases, requests, gains)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
