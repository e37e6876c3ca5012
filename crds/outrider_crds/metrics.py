"""Prometheus metrics that the fields of a document declare. One declaration serves the state, the metrics, and
docs/reference/metrics.md, which `python -m setup.reference` writes.

A field is declared as `Annotated[int, Metric("outrider_steps_total")]`. Its docstring is the metric's description, and
the first sentence is the help text of a scrape. Names of counters end in `_total`.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class MetricKind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class HistogramLike(typing.Protocol):
    @property
    def counts(self) -> Sequence[int]:
        """Observations per bucket, not cumulative. There is one bucket more than bounds."""

    @property
    def sum_s(self) -> float: ...


Labelled = tuple[tuple[str, ...], Any]
"""(values of a metric's own labels, its value: a number, a histogram or a model)."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of a metric in a field's annotation."""

    name: str
    labels: tuple[str, ...] = ()
    """Labels in addition to the group's label."""
    series: Callable[[Any, Any], Iterable[Labelled]] | None = None
    """Function (model, value of the field) -> series. None: the value itself, 1 for a text that is not empty, and no
    series for None."""
    bounds_s: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


@dataclass(frozen=True, slots=True)
class Group:
    """A section of the reference with the metrics of one model, which is its class variable `METRICS`."""

    title: str
    text: str = ""
    label: str = ""
    """Label with the item's `name` if the model is an item of a list, else with the name of the field."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its name in Prometheus, its labels, and a function that reads its series from the document."""

    name: str
    kind: MetricKind
    description: str
    labels: tuple[str, ...]
    samples: Callable[[Any], Iterable[Labelled]]
    bounds_s: tuple[float, ...]
    group: Group

    @property
    def help(self) -> str:
        """First sentence of the description."""
        return self.description.split(". ")[0].rstrip(".") + "."


Owners = Callable[[Any], Iterable[Labelled]]


def metrics_of(model: type[BaseModel]) -> Iterator[MetricSpec]:
    """Metrics of a document and the models in it, in the order of their fields."""
    yield from _metrics(model, lambda document: [((), document)], ())


def metric_of(model: type[BaseModel], field: str) -> MetricSpec:
    """The metric that a field declares, its group's label included. Raises StopIteration if it declares none."""
    metric = next(note for note in model.model_fields[field].metadata if isinstance(note, Metric))
    group = _group(model)
    labels = (group.label,) if group.label else ()
    return _spec(metric, field, model.model_fields[field], group, lambda owner: [((), owner)], labels)


def _metrics(model: type[BaseModel], owners: Owners, labels: tuple[str, ...]) -> Iterator[MetricSpec]:
    group = _group(model)
    labels = (*labels, group.label) if group.label else labels
    inner: dict[type[BaseModel], list[str]] = {}
    for name, field in model.model_fields.items():
        yield from (
            _spec(metric, name, field, group, owners, labels) for metric in field.metadata if isinstance(metric, Metric)
        )
        for member in _models(field.annotation):
            if hasattr(member, "METRICS"):
                inner.setdefault(member, []).append(name)
    for member, names in inner.items():
        yield from _metrics(member, _members(owners, names, is_labelled=bool(_group(member).label)), labels)


def _group(model: type[BaseModel]) -> Group:
    group: Group = getattr(model, "METRICS", Group(""))
    return group


def _spec(
    declared: Metric, name: str, field: FieldInfo, group: Group, owners: Owners, labels: tuple[str, ...]
) -> MetricSpec:
    series = declared.series or (lambda _owner, value: [] if value is None else [((), value)])

    def samples(document: Any) -> Iterator[Labelled]:
        for own, owner in owners(document):
            for more, value in series(owner, getattr(owner, name)):
                yield (*own, *more), (value != "" if isinstance(value, str) else value)

    kind = (
        MetricKind.COUNTER
        if declared.name.endswith("_total")
        else MetricKind.HISTOGRAM
        if declared.bounds_s
        else MetricKind.GAUGE
    )
    description = " ".join((field.description or "").split())
    return MetricSpec(
        declared.name, kind, description, (*labels, *declared.labels), samples, declared.bounds_s, group
    )  # fmt: skip


def _members(owners: Owners, names: Sequence[str], *, is_labelled: bool) -> Owners:
    """Function that returns the models in these fields of each owner. A field is a model, a list of models, or None."""

    def members(document: Any) -> Iterator[Labelled]:
        for labels, owner in owners(document):
            for name in names:
                value = getattr(owner, name)
                if isinstance(value, list):
                    yield from (((*labels, item.name), item) for item in value)
                elif value is not None:
                    yield (*labels, name) if is_labelled else labels, value

    return members


def _models(annotation: Any) -> list[type[BaseModel]]:
    parts = [annotation, *typing.get_args(annotation)]
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
