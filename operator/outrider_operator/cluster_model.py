"""Types for what the operator reads: `Observed` is the input of `decide(observed, settings) -> Plan` (`plan.py`).

Kubernetes objects are plain JSON dicts as the API server sends them. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import islice
from typing import Any

from outrider_crds.conditions import Condition
from outrider_crds.existing_pods import ExistingPods, WorkloadForm
from outrider_crds.prefetch_report import PrefetchProgress
from outrider_crds.rules import violations
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import SpeculativeServiceStatus
from pydantic import ValidationError

from outrider_operator.configuration import OperatorSettings as OperatorSettings
from outrider_operator.figure_windows import FigureWindows

Object = dict[str, Any]

# Kinds of children whose names are or begin with the service's name, in the order in which they are applied.
SERVICE_ACCOUNT, CONFIG_MAP, KUBERNETES_SERVICE = "ServiceAccount", "ConfigMap", "Service"
DISRUPTION_BUDGET, DEPLOYMENT, JOB = "PodDisruptionBudget", "Deployment", "Job"
NETWORK_POLICY, INFERENCE_POOL = "NetworkPolicy", "InferencePool"
LEADER_WORKER_SET = "LeaderWorkerSet"

SERVICE_LABEL = "outrider.dev/service"
REVISION_LABEL = "outrider.dev/revision"
TRACK_LABEL, CANARY_TRACK = "outrider.dev/track", "canary"
"""Label of the pods and the Deployment of a draft canary."""
COMPONENT_LABEL = "outrider.dev/component"
JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
"""Label that Kubernetes sets on the pods of a Job."""
SERVING, PROFILING, PROFILE, PREFETCH = "serving", "profiling", "profile", "prefetch"
"""Values of the component label: serving pods and their children, profiling Jobs and pods, profile ConfigMaps, and the
Job that downloads models."""
WORKER = "serving-worker"
"""Component of the pods of a group other than its leader. Services, budgets and selectors are for leaders alone."""
GROUPS_LABEL = "leaderworkerset.sigs.k8s.io/name"
"""Label of the pods and StatefulSets of a LeaderWorkerSet: its name."""
SHARED_PROFILE = "shared-profile"
"""Component of profiles for all namespaces: ConfigMaps in the operator's own namespace, and nowhere else."""
MANAGED_BY_LABEL, MANAGER = "app.kubernetes.io/managed-by", "outrider"
FIELD_MANAGER = "outrider"
_GROUPS_SUFFIX = "-nodes"
_MAX_VIOLATIONS = 4
"""Violations of a spec that a message lists."""
TOO_LARGE = "outrider.dev/too-large"
"""Key in the copy of a spec that is too large for the cache: its size in bytes. Only `PODLESS_FIELDS` are kept."""
REPLICA_WRITER = "outrider.dev/replica-writer"
"""Key in the copy of a service for the cache: the field manager that wrote spec.replicas last. It is never sent."""
PODLESS_FIELDS = (
    "replicas", "paused", "speculation", "sloClasses", "defaultSLOClass", "rollout", "profiling", "metrics",
    "gateway",
)  # fmt: skip
"""Fields of a spec that make no revision."""


class KindAccess(Enum):
    """Can objects of another project's kind be had in this cluster?"""

    UNKNOWN = "unknown"
    """Not looked for: the service asks for none."""
    SERVED = "served"
    NOT_INSTALLED = "not installed"
    FORBIDDEN = "forbidden"


@dataclass(frozen=True)
class Node:
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Object, ...] = ()
    allocatable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ServiceIdentity:
    """Identity of a service. Its children have its name and refer to it by its uid."""

    name: str
    namespace: str
    uid: str


@dataclass(frozen=True)
class ApiRefusal:
    """A write that the API server refused, or that admission changed. Plans leave it out until it is due again."""

    kind: str
    name: str
    component: str
    """Component label of the object."""
    message: str
    """Message of the API server."""
    write: str
    """`fingerprint` of the refused write. A changed document of the same name is another write."""
    is_stored: bool = False
    """True if the object was stored, but an admission policy changed it. `message` names the field."""


@dataclass(frozen=True)
class Observed:
    """A consistent snapshot of a service and all objects that belong to it."""

    service: Object
    """The SpeculativeService as the API server sent it."""
    at: float
    """Unix seconds."""
    nodes: tuple[Node, ...] | None = ()
    """Nodes; None if the operator may not read them (watchNamespaces without a ClusterRole)."""
    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    """(kind, name) -> object, for `child_names` and for every ConfigMap and NetworkPolicy with the service's label.

    Objects of other owners are included: a name that is not in the cache is read, so that a foreign object is noticed
    before it is touched.
    """
    replica_sets: tuple[Object, ...] = ()
    """ReplicaSets with the service's label."""
    pods: tuple[Object, ...] = ()
    """Serving pods, which the service's Deployments or its LeaderWorkerSet created; of each group its leader. Those of
    another workload, where the service selects them."""
    pod_rivals: Mapping[str, str] = field(default_factory=dict)
    """Pod name -> another service that the pod serves, for pods of another workload."""
    workers: tuple[Object, ...] = ()
    """The other pods of each group."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Name -> newest Warning event ("FailedMount: ..."), for pods that have no container yet and Jobs without a pod."""
    provisioning: Mapping[str, str] = field(default_factory=dict)
    """Pod name -> message of an autoscaler about the node that it adds, for pods without a node."""
    states: Mapping[str, RuntimeState] = field(default_factory=dict)
    """Pod name -> its newest state, for pods that answered recently."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Pod name -> error of the last poll, for ready pods that did not answer it."""
    network_policies: tuple[Object, ...] = ()
    """All NetworkPolicies of the namespace. They are read only while a pod is unreachable."""
    jobs: tuple[Object, ...] = ()
    """All profiling Jobs of the namespace."""
    job_pods: tuple[Object, ...] = ()
    """All pods of profiling Jobs of the namespace."""
    prefetch_jobs: tuple[Object, ...] = ()
    """Jobs with the service's label that download models."""
    prefetch_pods: tuple[Object, ...] = ()
    """Pods of such Jobs."""
    prefetch_progress: PrefetchProgress | None = None
    """What the pod that downloads reports; None where none does."""
    profiles: Mapping[str, Object] = field(default_factory=dict)
    """Name -> profile ConfigMap, all of the namespace. ConfigMaps have no `data` until a plan requests it
    (`Plan.read`)."""
    shared_profiles: Mapping[str, Object] = field(default_factory=dict)
    """Profile ConfigMaps in the operator's namespace, which all namespaces use, by their names in other namespaces."""
    measured_elsewhere: frozenset[str] = frozenset()
    """Names of Jobs in namespaces whose measurements all namespaces use; none that the service's own precedes."""
    pool_access: KindAccess = KindAccess.UNKNOWN
    """SERVED where `children` have the InferencePool of the service's name, and the endpoint picker's Service, if they
    are there."""
    groups_access: KindAccess = KindAccess.UNKNOWN
    """SERVED where `children` have the service's LeaderWorkerSet, if it is there."""
    figures: FigureWindows = field(default_factory=FigureWindows)
    refusals: tuple[ApiRefusal, ...] = ()
    """Writes that were refused recently, for this generation of the service."""
    replica_rivals: tuple[str, ...] = ()
    """Field managers that set spec.replicas in turn lately; empty if none undoes what another did."""

    @property
    def identity(self) -> ServiceIdentity:
        metadata = self.service["metadata"]
        return ServiceIdentity(str(metadata["name"]), str(metadata["namespace"]), str(metadata["uid"]))

    @property
    def generation(self) -> int:
        return int(self.service["metadata"].get("generation", 0))

    @cached_property
    def parsed(self) -> SpeculativeServiceSpec | str:
        """The spec, or a sentence about what is wrong with it.

        A spec may be wrong because the CRD of another release accepted it. Unknown fields are ignored: the API server
        adds defaults of a newer CRD on every read.
        """
        spec = self.service.get("spec") or {}
        if TOO_LARGE in spec:
            return f"it takes {spec[TOO_LARGE]} bytes, and 64 KiB are the most; make podTemplate or engine shorter"
        try:
            parsed = SpeculativeServiceSpec.model_validate(spec, extra="ignore")
        except ValidationError as error:
            broken = [f"spec.{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()]
            return "; ".join(broken[:_MAX_VIOLATIONS])
        return "; ".join(islice(violations(parsed, "spec"), _MAX_VIOLATIONS)) or parsed

    @cached_property
    def status(self) -> SpeculativeServiceStatus:
        return read_status(self.service)


def read_status(service: Object) -> SpeculativeServiceStatus:
    """The status without conditions that this release does not know; an empty one if it cannot be read."""
    status = service.get("status") or {}
    conditions = [condition for condition in status.get("conditions") or () if _is_condition(condition)]
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


def picker_name(service: str, named: str | None) -> str:
    """Kubernetes Service of the endpoint picker: the one that is `named`, else the usual one."""
    return named or f"{service}-epp"


def hot_map_name(service: str) -> str:
    """Name of the ConfigMap with settings that running pods adopt."""
    return f"{service}-hot"


def canary_name(service: str) -> str:
    """Name of a draft canary's Deployment."""
    return f"{service}-canary"


def groups_name(service: str) -> str:
    """Name of a service's LeaderWorkerSet. Its controller makes a headless Service of the same name."""
    return f"{service}{_GROUPS_SUFFIX}"


def groups_names(service: str, *, has_policy: bool) -> tuple[tuple[str, str], ...]:
    """(kind, name) of the children of a service whose replicas are groups."""
    name = groups_name(service)
    return ((LEADER_WORKER_SET, name), *(((NETWORK_POLICY, name),) if has_policy else ()))


def is_over_nodes(service: Object) -> bool:
    """Does the spec ask for groups of pods? It may be one that this release cannot read."""
    engine = (service.get("spec") or {}).get("engine")
    nodes = engine.get("nodes") if isinstance(engine, dict) else None
    return isinstance(nodes, int) and nodes > 1


def existing_pods(service: Object | None) -> ExistingPods | None:
    """The pods of another workload that the service selects; None if Outrider makes them, or if it cannot be read."""
    workload = ((service or {}).get("spec") or {}).get("workload")
    try:
        return WorkloadForm.model_validate(workload, extra="ignore").existing if workload else None
    except ValidationError:
        return None


def service_of_groups(name: str) -> str:
    """Name of the service that a LeaderWorkerSet of this name is of; empty if it is not Outrider's."""
    return name.removesuffix(_GROUPS_SUFFIX) if name.endswith(_GROUPS_SUFFIX) else ""


def config_file_map_name(service: str) -> str:
    """Name of the ConfigMap that pods of another workload mount."""
    return f"{service}-config"


def canary_hot_map_name(service: str) -> str:
    """Name of the ConfigMap with settings that running canary pods adopt."""
    return f"{service}-canary-hot"


def revision_map_name(service: str, revision: str) -> str:
    """Name of the ConfigMap of a revision."""
    return f"{service}-{revision}"


def child_names(service: str) -> tuple[tuple[str, str], ...]:
    """(kind, name) of the children with fixed names."""
    return (
        (SERVICE_ACCOUNT, service),
        (CONFIG_MAP, hot_map_name(service)),
        (KUBERNETES_SERVICE, service),
        (DISRUPTION_BUDGET, service),
        (DEPLOYMENT, service),
    )


def canary_names(service: str) -> tuple[tuple[str, str], ...]:
    """(kind, name) of the children of a draft canary, except the ConfigMap of its revision."""
    return ((CONFIG_MAP, canary_hot_map_name(service)), (DEPLOYMENT, canary_name(service)))
