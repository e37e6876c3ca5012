"""The state of a canary: `status.rollout`, its clock, and its copy on the canary's Deployment. Either suffices.

The annotation `outrider.dev/rollout` holds the fields in `_LASTING` as JSON, and nothing else.
"""

from __future__ import annotations

from datetime import UTC, datetime

from outrider_crds.status import RolloutStatus
from pydantic import ValidationError

from outrider_operator.cluster_model import Object
from outrider_operator.validation.reading import annotation, unix_seconds

RECORD_ANNOTATION = "outrider.dev/rollout"
"""Annotation of the canary's Deployment: the canary in JSON."""
_LASTING = {
    "phase", "cause", "candidate", "stable", "started_at", "candidate_percent", "detail", "obeyed", "held_seconds",
    "held_since", "idle_seconds", "sums",
}  # fmt: skip
"""Fields of the status that decisions depend on; the others are for people."""
_LONGEST_RECORD = 8 * 1024
"""Characters: the cache drops an annotation that is too large. Sums of some twenty pods are left to the status."""
_NEWS_SHARE = 0.1
"""Growth of the requests from which on the record is written again: each write is one of the ReplicaSet, too."""


def started_s(canary: RolloutStatus) -> float:
    """Unix seconds at which the attempt began."""
    return unix_seconds(canary.started_at) or 0.0


def attempt_of(canary: RolloutStatus) -> str:
    """Name of the attempt: a retry of the same candidate has another one, and counts from 0."""
    return f"{canary.candidate}-{started_s(canary):.0f}"


def measured_s(canary: RolloutStatus, at: float) -> float:
    """Seconds until `at` (Unix seconds) that count towards the timeout."""
    return (unix_seconds(canary.held_since) or at) - started_s(canary) - canary.held_seconds


def with_clock(canary: RolloutStatus, at: float, *, runs: bool) -> RolloutStatus:
    """`canary` while the clock of its timeout runs, or does not since nothing can be measured."""
    since = unix_seconds(canary.held_since)
    if runs and since is not None:
        pause_s = canary.held_seconds + round(max(0.0, at - since))
        return canary.model_copy(update={"held_seconds": pause_s, "held_since": ""})
    return canary if runs or since is not None else canary.model_copy(update={"held_since": timestamp(at)})


def recorded(status: RolloutStatus | None, deployment: Object | None, at: float) -> RolloutStatus | None:
    """The canary in the status; where that has none, the record on the canary's Deployment; None without either.

    The status is written first, so the record is never ahead of it. One that starts after `at` is ignored."""
    if status is not None and status.phase:
        return status
    record = _read(annotation(deployment or {}, RECORD_ANNOTATION))
    return record if record is not None and record.phase and started_s(record) <= at else None


def record_text(canary: RolloutStatus, deployment: Object | None) -> str:
    """The record of `canary` for its Deployment; the one that stands there while it has little news."""
    stored = annotation(deployment or {}, RECORD_ANNOTATION)
    record = _read(stored)
    if record is not None and not _is_news(record, canary):
        return stored
    text = _text(canary, _LASTING)
    return text if len(text) <= _LONGEST_RECORD else _text(canary, _LASTING - {"sums"})


def timestamp(moment_s: float) -> str:
    """RFC 3339, in whole seconds."""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _text(canary: RolloutStatus, fields: set[str]) -> str:
    return canary.model_dump_json(by_alias=True, exclude_defaults=True, include=fields)


def _read(text: str) -> RolloutStatus | None:
    """Anyone may write an annotation."""
    try:
        return RolloutStatus.model_validate_json(text, extra="ignore") if text else None
    except ValidationError:
        return None


def _is_news(record: RolloutStatus, canary: RolloutStatus) -> bool:
    if _text(record, _LASTING - {"sums"}) != _text(canary, _LASTING - {"sums"}):
        return True
    return _requests(canary) > (1.0 + _NEWS_SHARE) * _requests(record)


def _requests(canary: RolloutStatus) -> int:
    return sum(entry.stable.requests + entry.candidate.requests for entry in canary.sums)
