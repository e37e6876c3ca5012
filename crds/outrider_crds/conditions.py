"""Kubernetes conditions: one per type, with a transition time that changes only with the status."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field, WithJsonSchema

from outrider_crds.base import Model
from outrider_crds.texts import Message

_MESSAGE_LIMIT = 2048


class ConditionType(StrEnum):
    SPEC_VALID = "SpecValid"
    PROFILES_READY = "ProfilesReady"
    AVAILABLE = "Available"
    UPDATED = "Updated"
    PROGRESSING = "Progressing"
    READY = "Ready"
    SPECULATION_ACTIVE = "SpeculationActive"
    GOODPUT_HEALTHY = "GoodputHealthy"
    SLO_ATTAINED = "SLOAttained"
    INFERENCE_POOL_READY = "InferencePoolReady"
    ADAPTERS_LOADED = "AdaptersLoaded"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionReason(StrEnum):
    """Every reason a condition may carry, grouped by the condition that uses it."""

    PENDING = "Pending"  # any condition, before its first evaluation
    # SpecValid
    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    NAME_CONFLICT = "NameConflict"
    HOST_PATH_FORBIDDEN = "HostPathForbidden"
    PROMETHEUS_NOT_CONFIGURED = "PrometheusNotConfigured"
    NOT_INSTALLED = "NotInstalled"  # InferencePoolReady too
    CHILD_REJECTED = "ChildRejected"
    # ProfilesReady
    PROFILED = "Profiled"
    LEARNING = "Learning"
    PROFILING = "Profiling"
    PROFILE_FAILED = "Failed"
    NOISY = "Noisy"
    STALE = "Stale"
    NO_MATCHING_NODE = "NoMatchingNode"
    VOCABULARY_MISMATCH = "VocabularyMismatch"
    WAITING_FOR_SERVING_POD = "WaitingForServingPod"
    # Available, Ready
    ENOUGH_READY_PODS = "EnoughReadyPods"
    TOO_FEW_READY_PODS = "TooFewReadyPods"
    ENDPOINT_READY = "EndpointReady"
    NO_READY_ENDPOINT = "NoReadyEndpoint"
    SCALED_TO_ZERO = "ScaledToZero"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    POD_CRASHING = "PodCrashing"
    POD_CANNOT_START = "PodCannotStart"
    POD_ENDED = "PodEnded"
    # Updated, Progressing
    UP_TO_DATE = "UpToDate"
    ROLLING_OUT = "RollingOut"
    CONFIG_PENDING = "ConfigPending"
    WAITING_FOR_PROFILE = "WaitingForProfile"
    WAITING_FOR_MODELS = "WaitingForModels"
    COMPLETE = "Complete"
    STALLED = "Stalled"
    NO_CAPACITY = "NoCapacity"
    DRAFTER_NOT_LOADED = "DrafterNotLoaded"
    CANARY_STARTING = "CanaryStarting"
    CANARY_MEASURING = "CanaryMeasuring"
    CANARY_RUNNING = "CanaryRunning"
    CANARY_FAILED = "CanaryFailed"
    CANARY_ERROR = "CanaryError"
    CANARY_INCONCLUSIVE = "CanaryInconclusive"
    PAUSED = "Paused"
    NO_POD_SELECTED = "NoPodSelected"
    POD_SHARED = "PodShared"
    NOT_ACTIVE = "NotActive"
    RESTART_NEEDED = "RestartNeeded"
    # SpeculationActive
    PAYS = "Pays"
    NOT_WORTH_IT = "NotWorthIt"
    MEASURED_SLOWER = "MeasuredSlower"
    OFF = "Off"
    NO_DRAFTER = "NoDrafter"
    NO_TRAFFIC = "NoTraffic"
    MEASURING = "Measuring"
    # GoodputHealthy, SLOAttained
    GOODPUT_AS_PREDICTED = "AsPredicted"
    BELOW_BASELINE = "BelowBaseline"
    ATTAINED = "Attained"
    MISSED = "Missed"
    INFEASIBLE = "Infeasible"
    NO_SLO_CLASSES = "NoSLOClasses"
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    # InferencePoolReady; NameConflict and ChildRejected too
    POOL_CURRENT = "PoolCurrent"
    NOT_ATTACHED = "NotAttached"
    NOT_ACCEPTED = "NotAccepted"
    NOT_REQUESTED = "NotRequested"
    # AdaptersLoaded
    ALL_LOADED = "AllLoaded"
    LOADING = "Loading"
    NOT_LOADED = "NotLoaded"
    NO_ADAPTERS = "NoAdapters"
    # Reconciling, Stalled
    RECONCILED = "Reconciled"
    NOT_STALLED = "NotStalled"


class Condition(Model):
    type: Annotated[ConditionType, WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 64})]
    """Type of the condition: SpecValid, Ready, Updated and so on."""
    status: ConditionStatus
    """True, False, or Unknown if nothing was measured or observed yet."""
    reason: Annotated[str, Field(min_length=1, max_length=64)]
    """Reason for the status, in one word for programs."""
    message: Message = ""
    """Reason for the status, in a sentence for people. It says what to do if something is wrong."""
    observed_generation: int = 0
    """metadata.generation for which the condition was computed."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When the status last changed."""


def condition(
    kind: ConditionType, status: ConditionStatus, reason: ConditionReason, message: str = "", *, generation: int = 0
) -> Condition:
    """A condition without a time, which `set_condition` adds. A message beyond the CRD's limit ends in an ellipsis."""
    if len(message) > _MESSAGE_LIMIT:
        message = message[: _MESSAGE_LIMIT - 1] + "…"
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        observed_generation=generation,
        last_transition_time="",
    )


def set_condition(conditions: Sequence[Condition], new: Condition, at: datetime) -> list[Condition]:
    """`conditions` with `new` in place of the condition of the same type.

    The transition time changes only with the status, not with reason, message or generation. `at` needs a time zone.
    """
    old = find_condition(conditions, new.type)
    since = old.last_transition_time if old is not None and old.status == new.status else timestamp(at)
    dated = new.model_copy(update={"last_transition_time": since})
    if old is None:
        return [*conditions, dated]
    return [dated if c.type == new.type else c for c in conditions]


def find_condition(conditions: Sequence[Condition], kind: ConditionType) -> Condition | None:
    """The condition of type `kind`; None if it was never set."""
    return next((c for c in conditions if c.type == kind), None)


def initial_conditions(conditions: Sequence[Condition], generation: int, at: datetime) -> list[Condition]:
    """`conditions` with every missing type set to Unknown/Pending, in the order of ConditionType."""
    result = list(conditions)
    for kind in ConditionType:
        if find_condition(result, kind) is None:
            pending = condition(
                kind, ConditionStatus.UNKNOWN, ConditionReason.PENDING, "Not evaluated yet.", generation=generation
            )
            result = set_condition(result, pending, at)
    return result


def timestamp(at: datetime) -> str:
    """Time in Kubernetes' form: RFC 3339, UTC, whole seconds. Raises ValueError for a time without a zone."""
    if at.tzinfo is None:
        raise ValueError("conditions need a time with a zone; pass datetime.now(UTC)")
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
