"""Phases of a canary, their causes, and what each phase means for pods and rollout."""

from __future__ import annotations

from enum import StrEnum

from outrider_crds.rollout_settings import OnInconclusive, RolloutCanary
from outrider_crds.status import RolloutStatus


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
