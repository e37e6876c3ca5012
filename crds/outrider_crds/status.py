"""`SpeculativeService.status`, its condition types and their reasons."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from outrider_crds.base import MapList, Model

Text = Annotated[str, Field(max_length=256)]
Message = Annotated[str, Field(max_length=2048)]


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


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    """Every reason a condition may carry, grouped by the condition that uses it."""

    PENDING = "Pending"  # any condition, before its first evaluation
    # SpecValid
    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    NAME_CONFLICT = "NameConflict"
    HOST_PATH_FORBIDDEN = "HostPathForbidden"
    PROMETHEUS_NOT_CONFIGURED = "PrometheusNotConfigured"
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
    # Updated, Progressing
    UP_TO_DATE = "UpToDate"
    ROLLING_OUT = "RollingOut"
    CONFIG_PENDING = "ConfigPending"
    WAITING_FOR_PROFILE = "WaitingForProfile"
    COMPLETE = "Complete"
    STALLED = "Stalled"
    NO_CAPACITY = "NoCapacity"
    PAUSED = "Paused"
    # SpeculationActive
    PAYS = "Pays"
    NOT_WORTH_IT = "NotWorthIt"
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


class Condition(Model):
    type: ConditionType
    status: ConditionStatus
    reason: Annotated[str, Field(min_length=1, max_length=64)]
    message: Message = ""
    observed_generation: int = 0
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class Summary(Model):
    """Strings for the printer columns."""

    goodput: Text = ""
    speedup: Text = ""
    acceptance: Text = ""
    slo: Text = ""


class Goodput(Model):
    tokens_per_second: Text
    baseline_tokens_per_second: Text = ""
    """Measured without speculation, in probe blocks on the same load; empty when no probe ran in the window."""
    speedup: Text = ""
    window: Text
    """Length of the window, a duration."""
    tokens: int
    """Tokens that reached users in the window."""
    pods: Text
    """Pods that answered, of those that are ready: "2/3"."""


class SLOClassStatus(Model):
    name: Text
    attainment_percent: Text = ""
    tpot_p50: Text = ""
    tpot_p99: Text = ""
    requests: int = 0
    """Requests that finished in the window."""


class DraftStatus(Model):
    name: Text
    profiled: bool = False
    loaded: bool = False
    reason: Text = ""
    """Why it is not loaded or not used, in a sentence."""
    acceptance_rate: Text = ""
    accepted_length: Text = ""
    share_percent: Text = ""
    """Share of engine steps' requests that used it in the window."""


class ProfileStatus(Model):
    product: Text
    config_map: Text = ""
    error_percent: Text = ""
    profiled_at: Text = ""
    stale: bool = False
    failed_key: Text = ""
    """Key whose measurement failed; it runs again only on a changed spec or `outrider.dev/reprofile`."""
    message: Message = ""


class SpeculativeServiceStatus(Model):
    """What Outrider observed."""

    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    selector: Annotated[str, Field(max_length=512)] = ""
    runtime_image: Text = ""
    conditions: Annotated[list[Condition], Field(max_length=16), MapList("type")] = []
    summary: Summary | None = None
    goodput: Goodput | None = None
    slo_classes: Annotated[list[SLOClassStatus], Field(max_length=8), MapList("name")] = []
    drafts: Annotated[list[DraftStatus], Field(max_length=8), MapList("name")] = []
    profiles: Annotated[list[ProfileStatus], Field(max_length=8), MapList("product")] = []
