"""`SpeculativeService.status`, its condition types and their reasons."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, WithJsonSchema

from outrider_crds.base import MapList, Model
from outrider_crds.runtime_state import ArmState, Count

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
    INFERENCE_POOL_READY = "InferencePoolReady"
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
    # InferencePoolReady; NameConflict and ChildRejected too
    POOL_CURRENT = "PoolCurrent"
    NOT_REQUESTED = "NotRequested"
    NOT_INSTALLED = "NotInstalled"
    # Reconciling, Stalled
    RECONCILED = "Reconciled"
    NOT_STALLED = "NotStalled"


class Condition(Model):
    type: Annotated[ConditionType, WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 64})]
    """What it tells about: SpecValid, Ready, Updated and so on."""
    status: ConditionStatus
    """True, False, or Unknown where nothing was measured or observed yet."""
    reason: Annotated[str, Field(min_length=1, max_length=64)]
    """Why, in one word for programs."""
    message: Message = ""
    """Why, in a sentence for people; where something is wrong, with what to do."""
    observed_generation: int = 0
    """metadata.generation that it was decided for."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When the status last changed."""


class Summary(Model):
    """Strings for the printer columns."""

    goodput: Text = ""
    """Tokens per second that reach users, over all pods."""
    speedup: Text = ""
    """Goodput / that of the same pods without speculation, as measured; empty until it differs from 1 beyond noise."""
    acceptance: Text = ""
    """Share of tried draft tokens that the target accepted."""
    slo: Text = ""
    """The class with the lowest attainment, and its attainment."""


class GoodputStatus(Model):
    tokens_per_second: Text
    """Tokens that reached users, per second, summed over pods."""
    baseline_tokens_per_second: Text = ""
    """What the same pods would give without speculation, by the probes; empty where `speedup` is."""
    speedup: Text = ""
    """tokensPerSecond against what the same pods would give without speculation; empty until probes tell it from 1."""
    speedup_range: Text = ""
    """Two standard errors on either side of `speedup`."""
    window: Text
    """Length of the window, a duration."""
    tokens: int
    """Tokens that reached users in the window."""
    pods: Text
    """Pods that answered, of those that are ready: "2/3"."""


class SLOClassStatus(Model):
    name: Text
    """The class's name in spec.sloClasses."""
    attainment_percent: Text = ""
    """Share of `requests` that met the class."""
    tpot_p50: Text = ""
    """Median time per output token after the first."""
    tpot_p99: Text = ""
    """99th percentile of the time per output token after the first."""
    requests: int = 0
    """Requests with a verdict in the window: they finished, or were given up after a miss."""
    aborted: int = 0
    """Requests whose client left in the window."""


class DraftStatus(Model):
    name: Text
    """The drafter's name in spec.draftPool."""
    kind: Text = ""
    """DFlash, DFlash2 or DSpark, as the checkpoint of method Block says; empty for other methods."""
    profiled: bool = False
    """Its cost is measured on every product."""
    loaded: bool = False
    """Every ready pod has it loaded."""
    reason: Text = ""
    """Why it is not loaded or not used, in a sentence."""
    acceptance_rate: Text = ""
    """Accepted draft tokens, of those that were tried, in the window."""
    accepted_length: Text = ""
    """Tokens that a request gained in a step with this drafter, bonus token included."""
    share_percent: Text = ""
    """Share of engine steps' requests that used it in the window."""
    memory: Text = ""
    """What it takes of each device, used or not: its weights, its KV of a cached token, and the share of the cached
    tokens (so of concurrent requests) that this costs."""


class BreakEven(Model):
    requests: int
    """That decode at a time."""
    context_tokens: int
    """Tokens of each request from which on drafting pays; 0: at any."""


class LongContextStatus(Model):
    """What a SparseSelf drafter brings by the profile, with 80% of its proposals accepted."""

    drafter: Text
    """Its name in the pool."""
    break_even: Annotated[list[BreakEven], Field(max_length=8)] = []
    """Break-even context by measured batch size. One is left out where drafting does not pay at the longest context
    that a request may take and the KV cache holds."""
    inflection_tokens: int | None = None
    """Context from which on a larger batch gains more (MagicDec's S_inflection), 0: at any; absent where there is none
    that so many requests can have."""


class ProfileStatus(Model):
    product: Text
    """One of spec.accelerator.products."""
    config_map: Text = ""
    """ConfigMap with the latency profile."""
    error_percent: Text = ""
    """Error of the latency model on shapes that it was not fitted to."""
    profiled_at: Text = ""
    """When it was measured."""
    long_contexts: Annotated[list[LongContextStatus], Field(max_length=8), MapList("drafter")] = []
    """Contexts at which drafting over a window pays, of each SparseSelf drafter that was profiled."""
    stale: bool = False
    """It is older than spec.profiling.maxAge, or does not fit the pods' device or engine."""
    failed_key: Text = ""
    """Key whose measurement failed; it runs again only on a changed spec or `outrider.dev/reprofile`."""
    message: Message = ""
    """What went wrong with the measurement, with the pod's own last lines."""


class DemandStatus(Model):
    product: Text
    """One of spec.accelerator.products."""
    replicas: Text
    """Pods on this product that the load of the last window takes at the SLO."""
    requests: int
    """Requests that a pod decodes at a time at the tightest `tpot` among the classes with traffic."""
    tokens_per_second: Text
    """What a pod gives at that."""


class RolloutArm(Model):
    name: Text
    """stable, the running revision's pool, or candidate, that of the spec."""
    requests: int = 0
    """Finished requests."""
    tokens_per_second: Text = ""
    """Tokens / second of their steps' price at full batch, by the corrected latency model."""
    attainment_percent: Text = ""
    """Share of the requests with an SLO class that met it."""
    failures: int = 0
    """Times that a drafter was suspended after an error."""


class RolloutProduct(Model):
    product: Text
    """One of spec.accelerator.products."""
    requests: int = 0
    """Finished requests of the arm that has fewer."""
    gain_percent: Text = ""
    """Candidate's goodput / stable's - 1; empty before minRequests."""
    gain_range: Text = ""
    """95% confidence range of the gain, valid at every look."""
    measured: bool = False
    """A canary pod of this product has reported."""


class RolloutSums(Model):
    product: Text
    """Product of the pod."""
    pod: Text = ""
    """Name of a canary pod; empty: processes that have ended."""
    started_at: float = 0.0
    """Unix time at which the pod's process started."""
    restarts: Count = 0
    """Processes of the pod that ended once the candidate had run in it."""
    stable: ArmState = ArmState()
    """Sums over the stable pool's requests."""
    candidate: ArmState = ArmState()
    """Sums over the candidate's requests."""


class RolloutStatus(Model):
    """The draft canary in progress, or the last one."""

    phase: Text = ""
    """Starting, Measuring, Promoting; at its end Successful, Failed, Error, Inconclusive, Superseded or Cancelled."""
    cause: Text = ""
    """Why it failed, cannot be measured or is inconclusive, in one word."""
    candidate: Text = ""
    """Revision of the spec; the annotations outrider.dev/promote, abort and retry name it."""
    stable: Text = ""
    """Revision that it is measured against, which the other pods run."""
    observed_generation: int = 0
    """metadata.generation that the phase was decided for."""
    started_at: Text = ""
    """When the measurement began."""
    requests: int = 0
    """Finished requests of the arm that has fewer."""
    gain_percent: Text = ""
    """Candidate's goodput / stable's - 1, of the product where it gains least."""
    gain_range: Text = ""
    """95% confidence range of the gain, valid at every look."""
    summary: Text = ""
    """Phase, requests and gain, for the printer column."""
    arms: Annotated[list[RolloutArm], Field(max_length=2), MapList("name")] = []
    """Both pools, summed over products."""
    products: Annotated[list[RolloutProduct], Field(max_length=8), MapList("product")] = []
    """The gain on each product; it must lose on none."""
    message: Message = ""
    """What was found, or how much longer it takes at this traffic."""
    detail: Message = ""
    """Sentence of a pod or of the cluster that belongs to the cause."""
    obeyed: Annotated[list[Text], Field(max_length=8)] = []
    """Annotations that were carried out, or had nothing to do: they stay, and mean nothing any more."""
    ignored: Annotated[list[Text], Field(max_length=8)] = []
    """Annotations that name no revision of this rollout."""
    held_seconds: int = 0
    """Seconds of pauses and of no replicas so far: they do not count towards the timeout."""
    held_since: Text = ""
    """When the pause that lasts began; empty without one."""
    sums: Annotated[list[RolloutSums], Field(max_length=72)] = []
    """What was counted so far; neither a restart of a pod nor of the operator loses it."""


class PrefetchStatus(Model):
    """The download of hub models into the claim of spec.modelCache."""

    claim_name: Text
    """The claim."""
    phase: Text
    """Downloading, Complete or Failed."""
    models: Annotated[list[Text], Field(max_length=9)] = []
    """Models that are downloaded."""
    downloaded: Text = ""
    """What of them is on the claim, for example 12.3 GB; empty where the pod does not report."""
    total: Text = ""
    """What they take."""


class SpeculativeServiceStatus(Model):
    """What Outrider observed."""

    observed_generation: int = 0
    """metadata.generation that this status was decided for."""
    replicas: int = 0
    """Serving pods that exist."""
    ready_replicas: int = 0
    """Serving pods that are ready."""
    updated_replicas: int = 0
    """Serving pods of the current revision."""
    ready_revision: Text = ""
    """The newest revision that had a ready pod; raised deadlines start no rollout of it."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the serving pods, for autoscalers."""
    rollout: RolloutStatus | None = None
    """The draft canary in progress, or the last one."""
    prefetch: PrefetchStatus | None = None
    """The download of models into the claim; absent where modelCache names none or no model is from a hub."""
    accelerator: Annotated[str, Field(max_length=512)] = ""
    """spec.accelerator.products, for the printer column."""
    runtime_image: Text = ""
    """The release's runtime image that the service runs on; a new operator does not change it by itself."""
    newer_runtime_image: Text = ""
    """The installed release's runtime image, where the service is behind. The annotation outrider.dev/runtime-upgrade
    with this value, or its tag, moves it there by a rollout."""
    conditions: Annotated[list[Condition], Field(max_length=16), MapList("type")] = []
    """One of each type."""
    summary: Summary | None = None
    """Figures for the printer columns."""
    goodput: GoodputStatus | None = None
    """Goodput over the last window."""
    slo_classes: Annotated[list[SLOClassStatus], Field(max_length=8), MapList("name")] = []
    """Attainment and latency of each SLO class over the last window."""
    drafts: Annotated[list[DraftStatus], Field(max_length=8), MapList("name")] = []
    """Each drafter of the pool."""
    profiles: Annotated[list[ProfileStatus], Field(max_length=8), MapList("product")] = []
    """The latency profile of each product."""
    demand: Annotated[list[DemandStatus], Field(max_length=8), MapList("product")] = []
    """Replicas that the load takes, for each product that can keep the SLO. Advice: Outrider itself does not scale."""
