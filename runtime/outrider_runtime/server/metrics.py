"""Prometheus metrics, generated from the same `RuntimeState` that `GET /outrider/state` answers.

One table, `METRICS`, names every metric; docs/metrics.md documents the same names one by one. Every series carries
`outrider_service` and `outrider_namespace`, which the chart's PodMonitor sets anew; the pod comes from the scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from outrider_crds.state import TPOT_BUCKETS_S, TTFT_BUCKETS_S, Histogram, ProfileSource, RuntimeState
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SERVICE_LABELS = ("outrider_service", "outrider_namespace")
_REASONS = ("Pays", "NotWorthIt", "Off", "NoDrafter", "NoTraffic", "Measuring")


class Kind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Sample:
    """One series: values of the metric's own labels, and a number, or a histogram with its bounds."""

    labels: tuple[str, ...]
    value: float | Histogram


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its name as Prometheus sees it, its own labels, and how its series follow from the state."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    samples: Callable[[RuntimeState], Iterable[Sample]]
    bounds_s: tuple[float, ...] = ()


def _one(name: str, kind: Kind, help_: str, value: Callable[[RuntimeState], float]) -> MetricSpec:
    return MetricSpec(name, kind, help_, (), lambda state: [Sample((), value(state))])


def _gauge(name: str, help_: str, value: Callable[[RuntimeState], float]) -> MetricSpec:
    return _one(name, Kind.GAUGE, help_, value)


def _counter(name: str, help_: str, value: Callable[[RuntimeState], float]) -> MetricSpec:
    return _one(name, Kind.COUNTER, help_, value)


def _drafter(name: str, kind: Kind, help_: str, field: str) -> MetricSpec:
    def samples(state: RuntimeState) -> Iterator[Sample]:
        return (Sample((drafter.name,), float(getattr(drafter, field))) for drafter in state.drafters)

    return MetricSpec(name, kind, help_, ("drafter",), samples)


def _slo_class(name: str, help_: str, field: str) -> MetricSpec:
    def samples(state: RuntimeState) -> Iterator[Sample]:
        return (Sample((slo.name,), float(getattr(slo, field))) for slo in state.slo_classes)

    return MetricSpec(name, Kind.COUNTER, help_, ("slo_class",), samples)


def _slo_histogram(name: str, help_: str, field: str, bounds_s: tuple[float, ...]) -> MetricSpec:
    def samples(state: RuntimeState) -> Iterator[Sample]:
        return (Sample((slo.name,), getattr(slo, field)) for slo in state.slo_classes)

    return MetricSpec(name, Kind.HISTOGRAM, help_, ("slo_class",), samples, bounds_s)


def _info(state: RuntimeState) -> list[Sample]:
    labels = (state.revision, state.config_hash, state.product, state.device, state.engine_version)
    return [Sample((*labels, state.profile.target_key), 1.0)]


def _drafter_info(state: RuntimeState) -> list[Sample]:
    return [Sample((drafter.name, drafter.reason), 1.0) for drafter in state.drafters]


def _profile_error(state: RuntimeState) -> list[Sample]:
    error = state.profile.error_percent
    return [] if error is None else [Sample((), error)]


def _chosen_draft_tokens(state: RuntimeState) -> list[Sample]:
    return [Sample((state.choice.drafter,), state.choice.draft_tokens)]


def _choice_reasons(state: RuntimeState) -> list[Sample]:
    return [Sample((reason,), float(state.choice.reason == reason)) for reason in _REASONS]


def _draft_lengths(state: RuntimeState) -> list[Sample]:
    return [Sample((str(length),), count) for length, count in enumerate(state.draft_length_steps)]


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "outrider_info",
        Kind.GAUGE,
        "Always 1; what runs in this pod.",
        ("revision", "config_hash", "product", "device", "engine_version", "target_key"),
        _info,
    ),
    _gauge("outrider_started_timestamp_seconds", "When the process started, Unix time.", lambda s: s.started_at),
    _gauge("outrider_ready", "1 while the pod is ready for requests.", lambda s: s.ready),
    _gauge("outrider_plugin_active", "1 while the controller inside the engine reports.", lambda s: s.plugin_active),
    _gauge("outrider_config_error", "1 while the mounted hot config cannot be used.", lambda s: bool(s.config_error)),
    _gauge(
        "outrider_profile_mounted",
        "1 with a mounted latency profile, 0 while the coefficients are learned from this pod's own steps.",
        lambda s: s.profile.source == ProfileSource.MOUNTED,
    ),
    MetricSpec(
        "outrider_profile_error_percent", Kind.GAUGE, "Held-out error of the profile in force.", (), _profile_error
    ),
    _gauge(
        "outrider_profile_mismatch",
        "1 while device, engine or commit differ from those of the profile.",
        lambda s: bool(s.profile.mismatch),
    ),
    _gauge(
        "outrider_profile_load_error", "1 while a mounted profile is unreadable.", lambda s: bool(s.profile.load_error)
    ),
    _gauge("outrider_requests_running", "Requests in the last engine step.", lambda s: s.choice.running),
    _gauge("outrider_drafts_gated", "1 while some draft's cache is not fed under load.", lambda s: s.choice.gated),
    MetricSpec(
        "outrider_chosen_draft_tokens",
        Kind.GAUGE,
        "Mean draft length over the last steps' decoding requests.",
        ("drafter",),
        _chosen_draft_tokens,
    ),
    MetricSpec(
        "outrider_choice", Kind.GAUGE, "1 for the reason of the present choice, else 0.", ("reason",), _choice_reasons
    ),
    _counter("outrider_steps_total", "Engine steps that ran the model.", lambda s: s.steps),
    _counter(
        "outrider_speculative_steps_total",
        "Engine steps that verified at least one proposed token.",
        lambda s: s.speculative_steps,
    ),
    _counter("outrider_output_tokens_total", "Tokens that reached users.", lambda s: s.output_tokens),
    _counter("outrider_busy_seconds_total", "Seconds in engine steps.", lambda s: s.busy_s),
    _counter("outrider_proposed_tokens_total", "Tokens drafted, verified or not.", lambda s: s.proposed_tokens),
    MetricSpec(
        "outrider_draft_length_request_steps_total",
        Kind.COUNTER,
        "(request, step) pairs that verified so many proposed tokens.",
        ("draft_tokens",),
        _draft_lengths,
    ),
    _counter("outrider_dropped_steps_total", "Step times ignored as absurd.", lambda s: s.dropped_steps),
    _counter("outrider_loop_failures_total", "Times that the control loop itself raised.", lambda s: s.loop_failures),
    _counter("outrider_decision_seconds_total", "Seconds spent deciding.", lambda s: s.decision_s),
    _counter(
        "outrider_caught_up_tokens_total",
        "Tokens that the neural draft ran over to close holes in its KV.",
        lambda s: s.caught_up_tokens,
    ),
    _counter("outrider_catch_up_seconds_total", "Seconds spent closing those holes.", lambda s: s.catch_up_s),
    MetricSpec(
        "outrider_drafter_info",
        Kind.GAUGE,
        "Always 1; why a drafter is not used, in a sentence.",
        ("drafter", "reason"),
        _drafter_info,
    ),
    _drafter("outrider_drafter_loaded", Kind.GAUGE, "1 while the drafter is loaded.", "loaded"),
    _drafter(
        "outrider_drafter_request_steps_total",
        Kind.COUNTER,
        "(request, step) pairs in which the drafter had at least one proposed token verified.",
        "request_steps",
    ),
    _drafter("outrider_drafter_tried_total", Kind.COUNTER, "Proposed tokens really tried.", "tried"),
    _drafter("outrider_drafter_verified_total", Kind.COUNTER, "Proposed tokens that the target scored.", "verified"),
    _drafter("outrider_drafter_accepted_total", Kind.COUNTER, "Proposed tokens accepted.", "accepted"),
    _slo_class(
        "outrider_slo_class_finished_total", "Requests that finished, or were given up after a miss.", "finished"
    ),
    _slo_class("outrider_slo_class_attained_total", "Finished requests that met the class.", "attained"),
    _slo_class("outrider_slo_class_aborted_total", "Requests whose client left before the end.", "aborted"),
    _slo_class("outrider_slo_class_output_tokens_total", "Output tokens of finished requests.", "output_tokens"),
    _slo_histogram(
        "outrider_slo_class_tpot_seconds", "TPOT of finished requests of the class.", "tpot", TPOT_BUCKETS_S
    ),
    _slo_histogram(
        "outrider_slo_class_ttft_seconds", "TTFT of finished requests of the class.", "ttft", TTFT_BUCKETS_S
    ),
    _counter("outrider_speedup_probes_total", "Probe blocks without speculation.", lambda s: s.speedup.probes),
    _counter("outrider_speedup_baseline_tokens_total", "Tokens of probe blocks.", lambda s: s.speedup.baseline_tokens),
    _counter("outrider_speedup_baseline_seconds_total", "Seconds of probe blocks.", lambda s: s.speedup.baseline_s),
    _counter(
        "outrider_speedup_speculative_tokens_total",
        "Tokens of the speculative steps that probe blocks are compared with.",
        lambda s: s.speedup.speculative_tokens,
    ),
    _counter(
        "outrider_speedup_speculative_seconds_total",
        "Seconds of the speculative steps that probe blocks are compared with.",
        lambda s: s.speedup.speculative_s,
    ),
    _counter("outrider_speedup_weight_total", "Sum of 1 / variance of the probes' ratios.", lambda s: s.speedup.weight),
    _counter(
        "outrider_speedup_weighted_ratio_total",
        "Sum of the probes' ratios, with speculation by without, each times its weight.",
        lambda s: s.speedup.weighted_ratio,
    ),
)


class RuntimeStateCollector(Collector):
    """Turns the state of the moment of a scrape into the metrics of `METRICS`."""

    def __init__(self, read: Callable[[], RuntimeState]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        state = self._read()
        service = (state.service, state.namespace)
        for spec in METRICS:
            yield _family(spec, service, spec.samples(state))

    def describe(self) -> Iterator[Metric]:
        """The names alone, so that registering reads no state (prometheus_client collects otherwise)."""
        return (_family(spec, (), ()) for spec in METRICS)


def _family(spec: MetricSpec, service: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    names = (*SERVICE_LABELS, *spec.labels)
    if spec.kind is Kind.HISTOGRAM:
        return _histogram_family(spec, names, service, samples)
    make = CounterMetricFamily if spec.kind is Kind.COUNTER else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = make(spec.name, spec.help, labels=names)
    for sample in samples:
        assert not isinstance(sample.value, Histogram)
        family.add_metric([*service, *sample.labels], float(sample.value))
    return family


def _histogram_family(
    spec: MetricSpec, names: tuple[str, ...], service: tuple[str, ...], samples: Iterable[Sample]
) -> Metric:
    family = HistogramMetricFamily(spec.name, spec.help, labels=names)
    for sample in samples:
        assert isinstance(sample.value, Histogram)
        buckets = list(_cumulative(sample.value, spec.bounds_s))
        family.add_metric([*service, *sample.labels], buckets=buckets, sum_value=sample.value.sum_s)
    return family


def _cumulative(histogram: Histogram, bounds_s: tuple[float, ...]) -> Iterator[tuple[str, float]]:
    """Prometheus buckets (upper bound, observations at or below it) of per-bucket counts."""
    below = 0
    for bound, count in zip((*map(str, bounds_s), "+Inf"), histogram.counts, strict=True):
        below += count
        yield bound, float(below)
