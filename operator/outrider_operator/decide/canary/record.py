"""A canary as the status keeps it, and the copy of that on the canary's Deployment: either suffices to go on."""

from __future__ import annotations

from datetime import UTC, datetime

from outrider_crds.status import RolloutStatus, RolloutSums
from pydantic import ValidationError

from outrider_operator.cluster_model import Object
from outrider_operator.decide.canary.arms import Arms, Ledger, PodReport
from outrider_operator.decide.canary.machine import Canary, Cause
from outrider_operator.validation.reading import annotation, cut, unix_seconds

RECORD_ANNOTATION = "outrider.dev/rollout"
"""Annotation of the canary's Deployment: the canary in JSON."""
_LASTING = (
    "phase",
    "cause",
    "candidate",
    "stable",
    "startedAt",
    "candidatePercent",
    "detail",
    "obeyed",
    "heldSeconds",
    "heldSince",
    "idleSeconds",
    "sums",
)
"""Fields of the status that the record holds."""
_LONGEST_RECORD = 8 * 1024
"""Characters: the cache drops an annotation that is too large. Sums of some twenty pods are left to the status."""
_NEWS_SHARE = 0.1
"""Growth of the requests from which on the record is written again: each write is one of the ReplicaSet, too."""


def canary_of(status: RolloutStatus | None) -> Canary | None:
    """The canary in the status; None without one."""
    if status is None or not status.phase:
        return None
    return Canary(
        phase=status.phase,
        candidate=status.candidate,
        stable=status.stable,
        started_at=unix_seconds(status.started_at) or 0.0,
        cause=_cause(status.cause),
        said=status.detail,
        obeyed=tuple(status.obeyed),
        ledger=_ledger(status.sums),
        candidate_percent=status.candidate_percent,
        held_s=status.held_seconds,
        held_since=unix_seconds(status.held_since) or 0.0,
        idle_s=status.idle_seconds,
    )


def recorded(status: RolloutStatus | None, deployment: Object | None, at: float) -> RolloutStatus | None:
    """The status; where it has no canary, the record on the canary's Deployment. The status is written first, so the
    record is never ahead of it. A record that starts after `at` (Unix seconds) is ignored."""
    if status is not None and status.phase:
        return status
    record = _read(annotation(deployment or {}, RECORD_ANNOTATION))
    return record if record is not None and _started_at(record) <= at else status


def record_text(status: RolloutStatus, deployment: Object | None) -> str:
    """The record of `status` for the canary's Deployment; the one that stands there while it has little news."""
    stored = annotation(deployment or {}, RECORD_ANNOTATION)
    record = _read(stored)
    if record is not None and not _is_news(record, status):
        return stored
    text = _lasting(status).model_dump_json(by_alias=True, exclude_defaults=True)
    if len(text) <= _LONGEST_RECORD:
        return text
    return _lasting(status).model_copy(update={"sums": []}).model_dump_json(by_alias=True, exclude_defaults=True)


def sums_of(ledger: Ledger) -> list[RolloutSums]:
    """The ledger as the status keeps it."""
    ended = [
        _sums(product, "", 0.0, arms).model_copy(update={"restarts": ledger.ended_restarts.get(product, 0)})
        for product, arms in sorted(ledger.ended.items())
    ]
    return [*ended, *(_running_sums(last) for last in ledger.running)]


def timestamp(moment_s: float) -> str:
    """RFC 3339, in whole seconds."""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cause(text: str) -> Cause:
    """A newer release's is read as none: its phase is left alone anyway."""
    return Cause(text) if text in list(Cause) else Cause.NONE


def _started_at(status: RolloutStatus) -> float:
    return unix_seconds(status.started_at) or 0.0


def _read(text: str) -> RolloutStatus | None:
    """Anyone may write an annotation."""
    try:
        return RolloutStatus.model_validate_json(text, extra="ignore") if text else None
    except ValidationError:
        return None


def _lasting(status: RolloutStatus) -> RolloutStatus:
    kept = {name: value for name, value in status.wire().items() if name in _LASTING}
    return RolloutStatus.model_validate(kept)


def _is_news(record: RolloutStatus, status: RolloutStatus) -> bool:
    before, after = _lasting(record), _lasting(status)
    if before.model_copy(update={"sums": []}) != after.model_copy(update={"sums": []}):
        return True
    return _requests(after) > (1.0 + _NEWS_SHARE) * _requests(before)


def _requests(status: RolloutStatus) -> int:
    return sum(entry.stable.requests + entry.candidate.requests for entry in status.sums)


def _ledger(sums: list[RolloutSums]) -> Ledger:
    ended = {entry.product: Arms(entry.stable, entry.candidate) for entry in sums if not entry.pod}
    restarts = {entry.product: entry.restarts for entry in sums if not entry.pod and entry.restarts}
    running = (
        PodReport(entry.pod, entry.product, entry.started_at, Arms(entry.stable, entry.candidate), entry.restarts)
        for entry in sums
        if entry.pod
    )
    return Ledger(ended, restarts, tuple(running))


def _running_sums(last: PodReport) -> RolloutSums:
    sums = _sums(last.product, last.pod, last.started_at, last.arms)
    return sums.model_copy(update={"restarts": last.restarts})


def _sums(product: str, pod: str, started_at: float, arms: Arms) -> RolloutSums:
    return RolloutSums(
        product=cut(product), pod=cut(pod), started_at=started_at, stable=arms.stable, candidate=arms.candidate
    )
