"""The state of a canary: phases and causes, `status.rollout`, its clock, and its copy on the canary's Deployment.

The status or the copy alone suffices. The annotation `outrider.dev/rollout` holds the fields in `_LASTING` as JSON, and
nothing else.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

from outrider_crds.rollout_settings import OnInconclusive, RolloutCanary
from outrider_crds.rollout_status import RolloutStatus
from pydantic import ValidationError

from outrider_operator.cluster_model import Object
from outrider_operator.validation.reading import annotation, unix_seconds

RECORD_ANNOTATION = "outrider.dev/rollout"
"""Annotation of the canary's Deployment: the canary in JSON."""
_LASTING = {
    "phase", "cause", "candidate", "stable", "started_at", "candidate_percent", "detail", "obeyed", "held_seconds",
    "held_since", "idle_seconds", "restarts_before", "sums",
}  # fmt: skip
"""Fields of the status that decisions depend on; the others are for people."""
_FOR_PEOPLE = {"sums": {"__all__": {"stable": {"batch_steps"}, "candidate": {"batch_steps"}}}}
"""Fields of the sums that no decision depends on."""
_LONGEST_RECORD = 8 * 1024
"""Characters: the cache drops an annotation that is too large. Sums of over a dozen pods are left to the status."""
LOOK_EVERY_S = 60.0
"""Seconds between looks at a canary whose timeout runs. Each writes the status; its sums are news more often."""
_MOST_LOOK_S = 2.0 * LOOK_EVERY_S
"""Seconds that a look counts towards the timeout at most. More is a clock that jumped, or an operator that was away."""
_NEWS_SHARE = 0.1
"""Growth of the requests from which on the record is written again: each write is one of the ReplicaSet, too."""


class CanaryPhase(StrEnum):
    STARTING = "Starting"
    MEASURING = "Measuring"
    PROMOTING = "Promoting"
    SUCCESSFUL = "Successful"
    FAILED = "Failed"
    ERROR = "Error"
    INCONCLUSIVE = "Inconclusive"
    SUPERSEDED = "Superseded"
    CANCELLED = "Cancelled"


class Cause(StrEnum):
    """Why a canary is in its phase."""

    NONE = ""
    WORSE = "Worse"
    SLO_LOWERED = "SLOLowered"
    DRAFTER_FAILED = "DrafterFailed"
    DRAFTER_NOT_LOADED = "DrafterNotLoaded"
    CANDIDATE_CRASHED = "CandidateCrashed"
    ABORTED_BY_HAND = "AbortedByHand"
    NO_CAPACITY = "NoCapacity"
    POD_CANNOT_START = "PodCannotStart"
    PODS_DO_NOT_ANSWER = "PodsDoNotAnswer"
    RUNTIME_TOO_OLD = "RuntimeTooOld"
    NO_ROOM_FOR_BOTH = "NoRoomForBoth"
    STABLE_NOT_LOADED = "StableNotLoaded"
    CANNOT_HOST_BOTH = "CannotHostBoth"
    TIMEOUT = "Timeout"
    NO_TRAFFIC = "NoTraffic"
    IMPOSSIBLE_SUMS = "ImpossibleSums"
    NO_HEALTHY_BASELINE = "NoHealthyBaseline"
    OWN_DRAFTERS_UNUSED = "OwnDraftersUnused"
    STRATEGY_CHANGED = "StrategyChanged"


_UNDER_WAY = (CanaryPhase.STARTING, CanaryPhase.MEASURING, CanaryPhase.ERROR)
OPEN = (*_UNDER_WAY, CanaryPhase.INCONCLUSIVE)
"""Phases without a verdict."""
LEFT = (CanaryPhase.SUPERSEDED, CanaryPhase.CANCELLED, CanaryPhase.SUCCESSFUL)
"""Phases of a canary that is over, and is measured again if its candidate comes back."""


def is_foreign(canary: RolloutStatus | None) -> bool:
    """Was the canary written by a newer release?"""
    return canary is not None and canary.phase not in list(CanaryPhase)


def keeps_away(canary: RolloutStatus) -> bool:
    """Must the candidate stay away from the stable's pods?"""
    return canary.phase not in (CanaryPhase.PROMOTING, *LEFT)


def has_pods(canary: RolloutStatus, settings: RolloutCanary) -> bool:
    """Should a canary pod run?"""
    is_open = canary.phase == CanaryPhase.INCONCLUSIVE and settings.on_inconclusive is not OnInconclusive.ROLLBACK
    return is_open or canary.phase in _UNDER_WAY


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
    if since is None:
        looked = _looked(canary, at)
        return looked if runs else looked.model_copy(update={"held_since": timestamp(at), "looked_at": ""})
    if not runs:
        return canary
    held_s = canary.held_seconds + round(at - since)
    return canary.model_copy(update={"held_seconds": held_s, "held_since": "", "looked_at": timestamp(at)})


def _looked(canary: RolloutStatus, at: float) -> RolloutStatus:
    """`canary` at a look, of which the seconds since the last one count, 0 to `_MOST_LOOK_S`; the others were held."""
    looked_at = unix_seconds(canary.looked_at)
    since_s = at - looked_at if looked_at is not None else 0.0
    if looked_at is not None and 0.0 <= since_s < LOOK_EVERY_S:
        return canary
    held_s = canary.held_seconds + round(since_s - min(max(since_s, 0.0), _MOST_LOOK_S))
    return canary.model_copy(update={"held_seconds": held_s, "looked_at": timestamp(at)})


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
    return canary.model_dump_json(by_alias=True, exclude_defaults=True, include=fields, exclude=_FOR_PEOPLE)


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
