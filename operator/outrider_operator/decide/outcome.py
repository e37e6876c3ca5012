"""What one concern decides: writes, verdicts of conditions, fields of the status; and the sum of all outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from outrider_crds.conditions import ConditionReason, ConditionStatus, ConditionType

from outrider_operator.cluster_model import Object
from outrider_operator.plan import Adoption, Annotate, Delete

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    status: ConditionStatus
    reason: ConditionReason
    message: str = ""


Verdicts = dict[ConditionType, Verdict]


def true(reason: ConditionReason, message: str = "") -> Verdict:
    return Verdict(ConditionStatus.TRUE, reason, message)


def false(reason: ConditionReason, message: str = "") -> Verdict:
    return Verdict(ConditionStatus.FALSE, reason, message)


def unknown(reason: ConditionReason, message: str = "") -> Verdict:
    return Verdict(ConditionStatus.UNKNOWN, reason, message)


@dataclass(frozen=True)
class ConcernOutcome:
    """Writes, verdicts of conditions, fields of the status, and when to decide again.

    No two concerns decide the same condition or the same field.
    """

    objects: tuple[Object, ...] = ()
    """Children that should exist, stamped. A missing one is created; one that differs is applied."""
    unwanted: tuple[Object, ...] = ()
    """Children that should no longer exist."""
    create: tuple[Object, ...] = ()
    """Jobs and profiles to create, which are never applied again."""
    apply: tuple[Object, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    annotate: tuple[Annotate, ...] = ()
    delete: tuple[Delete, ...] = ()
    stored: frozenset[str] = frozenset()
    """Names of profiles that are written or whose Job is deleted: other services may wait for that."""
    published: frozenset[str] = frozenset()
    """Names of profiles that are stored for all namespaces."""
    conditions: Mapping[ConditionType, Verdict] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the status other than the conditions."""
    wake_after_s: float | None = None
    """Seconds until time alone changes the outcome; None if it never does."""


def merge(outcomes: Sequence[ConcernOutcome]) -> ConcernOutcome:
    """Add up `outcomes`. The earliest time to decide again counts."""
    return ConcernOutcome(
        objects=_chain(outcome.objects for outcome in outcomes),
        unwanted=_chain(outcome.unwanted for outcome in outcomes),
        create=_chain(outcome.create for outcome in outcomes),
        apply=_chain(outcome.apply for outcome in outcomes),
        adopt=_chain(outcome.adopt for outcome in outcomes),
        annotate=_chain(outcome.annotate for outcome in outcomes),
        delete=_chain(outcome.delete for outcome in outcomes),
        stored=frozenset(_chain(outcome.stored for outcome in outcomes)),
        published=frozenset(_chain(outcome.published for outcome in outcomes)),
        conditions=dict(_chain(outcome.conditions.items() for outcome in outcomes)),
        status=dict(_chain(outcome.status.items() for outcome in outcomes)),
        wake_after_s=earliest_s(outcome.wake_after_s for outcome in outcomes),
    )


def earliest_s(waits_s: Iterable[float | None]) -> float | None:
    """The shortest of `waits_s` that is still to come; None without one."""
    return min((wait_s for wait_s in waits_s if wait_s is not None and wait_s > 0), default=None)


def _chain(parts: Iterable[Iterable[T]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(parts))
