"""What the operator sees (`Observed`), and its words for it; `decide(observed, settings) -> Plan` (`plan.py`).

Kubernetes objects are plain JSON dicts, as the API server sends them; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from outrider_crds.rules import violations
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.state import RuntimeState
from outrider_crds.status import Condition, SpeculativeServiceStatus
from pydantic import ValidationError

Object = dict[str, Any]

# Kinds of the children that carry the service's own name (or start with it), in the order they are applied.
SERVICE_ACCOUNT, CONFIG_MAP, KUBERNETES_SERVICE = "ServiceAccount", "ConfigMap", "Service"
DISRUPTION_BUDGET, DEPLOYMENT, JOB = "PodDisruptionBudget", "Deployment", "Job"
NETWORK_POLICY = "NetworkPolicy"

SERVICE_LABEL = "outrider.dev/service"
REVISION_LABEL = "outrider.dev/revision"
TRACK_LABEL, CANARY_TRACK = "outrider.dev/track", "canary"
"""Label of the pods and the Deployment of a draft canary."""
COMPONENT_LABEL = "outrider.dev/component"
JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
"""On the pods of a Job, set by Kubernetes."""
SERVING, PROFILING, PROFILE = "serving", "profiling", "profile"
"""Values of the component label: serving pods and their children, profiling Jobs and pods, profile ConfigMaps."""
SHARED_PROFILE = "shared-profile"
"""Component of profiles for all namespaces: ConfigMaps in the operator's own namespace, and nowhere else."""
MANAGED_BY_LABEL, MANAGER = "app.kubernetes.io/managed-by", "outrider"
FIELD_MANAGER = "outrider"
METRICS_WINDOW_S = 60.0
"""Window that the status figures are measured over, unless the chart sets another."""
_MOST_TOLD = 4
"""Of what is wrong with a spec."""


TOO_LARGE = "outrider.dev/too-large"
"""Stands in a spec that was too large to be kept, together with `PODLESS_FIELDS`: its size in bytes."""
PODLESS_FIELDS = (
    "replicas", "paused", "speculation", "sloClasses", "defaultSLOClass", "rollout", "profiling", "metrics",
)  # fmt: skip
"""Fields of a spec that make no revision."""


@dataclass(frozen=True)
class Settings:
    """The chart's values, fixed for the life of the operator's process."""

    runtime_image: str
    """Default image of GPU services."""
    runtime_cpu_image: str
    """Default image of services on `cpu`."""
    image_pull_policy: str = "IfNotPresent"
    runtime_upgrade_percent: int = 0
    """Share of the services that move to these images; the others stay on those that they were given first."""
    allowed_host_paths: tuple[str, ...] = ()
    """Folders of nodes that pods may read, with all below them; none means no hostPath at all."""
    prometheus_configured: bool = False
    platform_assigns_user: bool = False
    """Pods name no user and no group: the platform gives each namespace its own (OpenShift)."""
    admin_port_peers: tuple[Object, ...] = ()
    """NetworkPolicyPeers that may reach the serving pods' admin port; none means that no NetworkPolicy is made."""
    profiling_priority_class: str = ""
    """Priority class of profiling Jobs (below serving, never preempting); empty for the cluster's default."""
    window_s: float = METRICS_WINDOW_S
    """Length of the window that figures are measured over, in seconds."""
    unschedulable_s: float = 60.0
    """A pod that finds no node for this long means NoCapacity, unless a node is being made for it."""
    namespace: str = ""
    """The operator's own."""
    profiles_shared_from: tuple[str, ...] = ()
    """Namespaces whose measurements all namespaces use."""
    engine_version: str = ""
    """Version of vLLM in `runtime_image`; empty where it is not known."""
    engine_version_cpu: str = ""
    """Version of vLLM in `runtime_cpu_image`."""


@dataclass(frozen=True)
class Node:
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Object, ...] = ()
    allocatable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DrafterFigures:
    """Sums over pods and window."""

    tried: float = 0.0
    accepted: float = 0.0
    request_steps: float = 0.0


@dataclass(frozen=True)
class SLOClassFigures:
    """Sums over pods and window."""

    finished: float = 0.0
    attained: float = 0.0
    tpot_counts: tuple[float, ...] = ()
    """Observations per bucket of TPOT_BUCKETS_S, not cumulative; one more than the bounds."""
    aborted: float = 0.0
    """Requests whose client left."""


@dataclass(frozen=True)
class Figures:
    """What a service did in one window, summed over its pods; the same from the pods and from Prometheus."""

    window_s: float
    pods_answered: int = 0
    pods_ready: int = 0
    output_tokens: float = 0.0
    request_steps: float = 0.0
    """(request, step) pairs, speculative or not."""
    busy_s: float = 0.0
    """Seconds of engine steps."""
    busy_steps: float = 0.0
    """Engine steps in those."""
    drafters: Mapping[str, DrafterFigures] = field(default_factory=dict)
    drafters_long: Mapping[str, DrafterFigures] = field(default_factory=dict)
    """In the probes' longer window: one that is only tried now and then may have no trial in this one."""
    slo_classes: Mapping[str, SLOClassFigures] = field(default_factory=dict)
    steps: float = 0.0
    speculative_steps: float = 0.0
    """Steps that verified a proposal; these and what follows in the probes' longer window."""
    probes: float = 0.0
    tokens_per_step: float = 0.0
    """Mean tokens of a request in a step; 0: not known."""
    probe_weight: float = 0.0
    probe_weighted_ratio: float = 0.0
    baseline_tokens: float = 0.0
    baseline_s: float = 0.0
    speculative_tokens: float = 0.0
    speculative_s: float = 0.0


@dataclass(frozen=True)
class FigureWindows:
    """The window that ends now and the one before it; None where there are not samples enough to fill it."""

    current: Figures | None = None
    previous: Figures | None = None
    error: str = ""
    """Sentence: why there are no figures (Prometheus does not answer, no pod does); empty when there are."""


@dataclass(frozen=True)
class Identity:
    """Which service: its children carry its name, and refer to it by its uid."""

    name: str
    namespace: str
    uid: str


@dataclass(frozen=True)
class Rejection:
    """A write that the API server refused, or stored otherwise; it is left out of plans until it is due again."""

    kind: str
    name: str
    component: str
    """Value of the component label of what the write was for: SERVING, PROFILING or PROFILE."""
    message: str
    """In the API server's words."""
    write: str
    """`fingerprint` of what was refused: another document of that name is another write."""
    is_stored: bool = False
    """The object is there, but not as it was sent: an admission policy rewrites it. `message` says where."""


@dataclass(frozen=True)
class Observed:
    """One consistent look at a service and what belongs to it."""

    service: Object
    """The SpeculativeService as the API server sent it."""
    now: float
    """Unix seconds."""
    nodes: tuple[Node, ...] | None = ()
    """None where the operator may not read nodes (watchNamespaces with Roles alone)."""
    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    """(kind, name) -> object, for the names of `child_names` and for every ConfigMap and NetworkPolicy labelled with
    the service.

    Whoever owns them: an object that is not in the watch cache is looked up by its name, so that a foreign one
    of that name is seen before it is touched.
    """
    replica_sets: tuple[Object, ...] = ()
    """Those with the service's label."""
    pods: tuple[Object, ...] = ()
    """Serving pods of the service: those that its Deployment made."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Name -> newest Warning event ("FailedMount: ..."), for pods that have no container yet and Jobs without a pod."""
    provisioning: Mapping[str, str] = field(default_factory=dict)
    """Name -> what an autoscaler says of the node that it makes, for pods that have none yet."""
    states: Mapping[str, RuntimeState] = field(default_factory=dict)
    """Pod name -> its newest state, for pods that answered lately."""
    unheard: Mapping[str, str] = field(default_factory=dict)
    """Pod name -> what became of the last question for its state, of ready pods that it brought none of."""
    network_policies: tuple[Object, ...] = ()
    """Of the namespace, whoever made them; looked for only while a pod is unheard."""
    jobs: tuple[Object, ...] = ()
    """All profiling Jobs of the namespace."""
    job_pods: tuple[Object, ...] = ()
    """All pods of profiling Jobs of the namespace."""
    profiles: Mapping[str, Object] = field(default_factory=dict)
    """Name -> profile ConfigMap, all of the namespace. This and other ConfigMaps are without `data` until a plan asks
    for that (`Plan.read`)."""
    shared_profiles: Mapping[str, Object] = field(default_factory=dict)
    """Profile ConfigMaps in the operator's own namespace, which count in all, by their names elsewhere."""
    measured_elsewhere: frozenset[str] = frozenset()
    """Names of Jobs that run in namespaces whose measurements all namespaces use."""
    figures: FigureWindows = FigureWindows()
    rejections: tuple[Rejection, ...] = ()
    """In force: refused lately, for this generation of the service."""

    @property
    def identity(self) -> Identity:
        metadata = self.service["metadata"]
        return Identity(str(metadata["name"]), str(metadata["namespace"]), str(metadata["uid"]))

    @property
    def generation(self) -> int:
        return int(self.service["metadata"].get("generation", 0))

    @cached_property
    def parsed(self) -> SpeculativeServiceSpec | str:
        """The spec, or a sentence that says where it is wrong (the CRD of another release let it through, or let it be
        because it was there before). Fields that this release does not know are left out: the API server fills in a
        later CRD's defaults on every read."""
        spec = self.service.get("spec") or {}
        if TOO_LARGE in spec:
            return f"it takes {spec[TOO_LARGE]} bytes, and 64 KiB are the most; make podTemplate or engine shorter"
        try:
            parsed = SpeculativeServiceSpec.model_validate(spec, extra="ignore")
        except ValidationError as error:
            broken = [f"spec.{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()]
            return "; ".join(broken[:_MOST_TOLD])
        return "; ".join(islice(violations(parsed, "spec"), _MOST_TOLD)) or parsed

    @cached_property
    def status(self) -> SpeculativeServiceStatus:
        return read_status(self.service)


def read_status(service: Object) -> SpeculativeServiceStatus:
    """The status as it stands, without the conditions that this release does not know; a fresh one where another
    release wrote what this one cannot read."""
    status = service.get("status") or {}
    conditions = [each for each in status.get("conditions") or () if _is_condition(each)]
    try:
        return SpeculativeServiceStatus.model_validate({**status, "conditions": conditions}, extra="ignore")
    except ValidationError:
        return SpeculativeServiceStatus()


def _is_condition(document: Object) -> bool:
    try:
        Condition.model_validate(document, extra="ignore")
    except ValidationError:
        return False
    return True


def hot_map_name(service: str) -> str:
    """The ConfigMap of what pods take on while they run."""
    return f"{service}-hot"


def canary_name(service: str) -> str:
    """Name of a draft canary's Deployment."""
    return f"{service}-canary"


def canary_hot_map_name(service: str) -> str:
    """The ConfigMap of what canary pods take on while they run."""
    return f"{service}-canary-hot"


def revision_map_name(service: str, revision: str) -> str:
    """The ConfigMap of one revision, by its name."""
    return f"{service}-{revision}"


def child_names(service: str) -> tuple[tuple[str, str], ...]:
    """(kind, name) of the children with fixed names; look each up, labelled or not."""
    return (
        (SERVICE_ACCOUNT, service),
        (CONFIG_MAP, hot_map_name(service)),
        (KUBERNETES_SERVICE, service),
        (DISRUPTION_BUDGET, service),
        (DEPLOYMENT, service),
    )


def canary_names(service: str) -> tuple[tuple[str, str], ...]:
    """(kind, name) of the children that a draft canary has besides its revision's ConfigMap."""
    return ((CONFIG_MAP, canary_hot_map_name(service)), (DEPLOYMENT, canary_name(service)))
