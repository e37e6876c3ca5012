"""Prometheus metrics of a pod, made from the same `RuntimeState` as the page `/outrider/state`.

The fields of `outrider_crds.runtime_state` declare the metrics. Every series has the labels `outrider_service` and
`outrider_namespace`, which the chart's PodMonitor overwrites; the label for the pod comes from the scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from outrider_crds.metrics import HistogramLike, Labelled, MetricKind, MetricSpec, metrics_of
from outrider_crds.runtime_state import RuntimeState
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SERVICE_LABELS = ("outrider_service", "outrider_namespace")
METRICS: tuple[MetricSpec, ...] = tuple(metrics_of(RuntimeState))


class RuntimeStateCollector(Collector):
    """Reads the state at each scrape and turns it into the metrics of `METRICS`."""

    def __init__(self, read: Callable[[], RuntimeState]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        state = self._read()
        service = (state.service, state.namespace)
        for spec in METRICS:
            yield _family(spec, service, spec.samples(state))

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without samples. Without this method, prometheus_client would collect at registration."""
        return (_family(spec, (), ()) for spec in METRICS)


def _family(spec: MetricSpec, service: tuple[str, ...], samples: Iterable[Labelled]) -> Metric:
    names = (*SERVICE_LABELS, *spec.labels)
    if spec.kind is MetricKind.HISTOGRAM:
        return _histogram_family(spec, names, service, samples)
    make = CounterMetricFamily if spec.kind is MetricKind.COUNTER else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = make(spec.name, spec.help, labels=names)
    for labels, value in samples:
        family.add_metric([*service, *labels], float(value))
    return family


def _histogram_family(
    spec: MetricSpec, names: tuple[str, ...], service: tuple[str, ...], samples: Iterable[Labelled]
) -> Metric:
    family = HistogramMetricFamily(spec.name, spec.help, labels=names)
    for labels, histogram in samples:
        buckets = list(_cumulative(histogram, spec.bounds_s))
        family.add_metric([*service, *labels], buckets=buckets, sum_value=histogram.sum_s)
    return family


def _cumulative(histogram: HistogramLike, bounds_s: tuple[float, ...]) -> Iterator[tuple[str, float]]:
    """Yield Prometheus buckets: the upper bound and the number of observations at or below it."""
    total = 0
    for bound, count in zip((*map(str, bounds_s), "+Inf"), histogram.counts, strict=True):
        total += count
        yield bound, float(total)
