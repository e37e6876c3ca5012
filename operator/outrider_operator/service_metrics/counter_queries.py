"""Counters that figures need, and their queries. A pod counts once in each, however many jobs scrape it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from outrider_crds import counters
from outrider_crds.counter_sums import Counters
from outrider_crds.metrics import MetricSpec, metric_of
from outrider_crds.model_sources import MOST_ADAPTERS

from outrider_operator.decide.figures.windows import OF_EVERY_REVISION
from outrider_operator.validation.reports import SERVICE_LABELS

MOST_LABELLED = 16
"""Drafters or classes per service that a query returns: twice the limit of the spec, since pods of the last revision
count, too. A faulty pod may export any number."""
BOUNDS_S = (*counters.TPOT_BUCKETS_S, float("inf"))
_MOST_SERIES = {"adapters": 2 * MOST_ADAPTERS, "tpot": MOST_LABELLED * len(BOUNDS_S)}
BY_SERVICE = ", ".join(SERVICE_LABELS)


@dataclass(frozen=True)
class NeededCounter:
    """A counter that figures need."""

    field: str
    name: str
    metric: MetricSpec

    @property
    def keys(self) -> tuple[str, ...]:
        """Label with the key in the field, if it has one."""
        return (self.metric.group.label,) if self.metric.group.label else ()

    @property
    def of_every_revision(self) -> bool:
        return (self.field or self.name) in OF_EVERY_REVISION


NEEDED: Mapping[str, tuple[type[Counters], Collection[str]]] = {
    "": (
        counters.StepCounters,
        ("output_tokens", "draft_length_steps", "steps", "speculative_steps", "busy_s",
         "batch_squared", "batch_accepted", "batch_busy_s", "prompt_busy_s"),
    ),
    "speedup": (counters.SpeedupCounters, counters.SpeedupCounters.model_fields),
    "drafters": (counters.DrafterCounters, ("request_steps", "tried", "accepted")),
    "slo_classes": (counters.SLOClassCounters, ("finished", "attained", "aborted")),
    "adapters": (counters.AdapterCounters, ("tried", "accepted", "finished", "attained")),
}  # fmt: skip
"""Field of `ServiceCounters` -> its counters, of which figures need these."""
_COUNTERS = [
    NeededCounter(field, name, metric_of(model, name)) for field, (model, names) in NEEDED.items() for name in names
]
OF_WINDOW = [counter for counter in _COUNTERS if counter.field != "speedup" and counter.name != "speculative_steps"]
RARE = [counter for counter in _COUNTERS if not counter.of_every_revision]
TPOT = NeededCounter("slo_classes", "tpot", metric_of(counters.SLOClassCounters, "tpot"))


def once(metric: str, window: str, *own: str, function: str = "") -> str:
    """Query for a metric of each pod once, though several jobs scrape it: with a PodMonitor and by annotations.

    The label pod identifies a pod; in a service none of whose series has one, instance does.
    """
    by = ", ".join((*SERVICE_LABELS, *own))
    return (
        f'max by ({by}, pod) ({function}({metric}{{pod!=""}}{window})) or on ({BY_SERVICE}) '
        f'max by ({by}, instance) ({function}({metric}{{pod=""}}{window}))'
    )


def gain(counter: NeededCounter, window: str, *more: str, suffix: str = "") -> str:
    """Query for a counter's growth by service and key, limited to some series per service."""
    by = ", ".join((*SERVICE_LABELS, *counter.keys, *more))
    by_pod = once(f"{counter.metric.name}{suffix}", window, *counter.metric.labels, *more, function="increase")
    most = _MOST_SERIES.get(counter.name, _MOST_SERIES.get(counter.field, MOST_LABELLED))
    return f"topk by ({BY_SERVICE}) ({most}, sum by ({by}) ({by_pod}))"


def gain_by_revision(counter: NeededCounter, window: str) -> str:
    """Query for a counter's growth by service, its key and revision, which a pod's outrider_info names.

    Only one outrider_info per pod is used: a pod that exports two would make the query fail for all services.
    """
    by, pod = ", ".join((*SERVICE_LABELS, *counter.keys, "revision")), "namespace, pod"
    known = f'max by ({pod}, revision) (last_over_time(outrider_info{{pod!=""}}{window}))'
    gained = f"({once(counter.metric.name, window, *counter.metric.labels, function='increase')})"
    joined = f"{gained} * on ({pod}) group_left (revision) (topk by ({pod}) (1, {known}))"
    return f"topk by ({BY_SERVICE}) ({MOST_LABELLED}, sum by ({by}) ({joined} or {gained} unless on ({pod}) {known}))"
