"""Kubernetes' own types that place a pod: tolerations, affinity, spread. The same fields, closed and bounded."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from outrider_crds.base import KubernetesModel
from outrider_crds.names import LabelKey, Labels, LabelValue, NamespaceName, ObjectName

Weight = Annotated[int, Field(ge=1, le=100)]


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(KubernetesModel):
    key: LabelKey | None = None
    """Taint key; every key when absent, which takes the operator Exists."""
    operator: Literal["Exists", "Equal"] | None = None
    """Equal (the default) compares the value; Exists takes any."""
    value: LabelValue | None = None
    """Taint value; for Equal."""
    effect: TaintEffect | None = None
    """Taint effect; every effect when absent."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """How long a NoExecute taint is borne; for ever when absent."""


class SelectorOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class LabelRequirement(KubernetesModel):
    key: LabelKey
    """Label key."""
    operator: SelectorOperator
    """In and NotIn take values; Exists and DoesNotExist take none."""
    values: Annotated[list[LabelValue], Field(max_length=32)] = []
    """Label values."""


class LabelSelector(KubernetesModel):
    match_labels: Labels = {}
    """Labels that must be there."""
    match_expressions: Annotated[list[LabelRequirement], Field(max_length=8)] = []
    """Requirements that must hold."""


class NodeRequirement(KubernetesModel):
    key: LabelKey
    """Node label key."""
    operator: NodeOperator
    """In and NotIn take values, Gt and Lt one whole number, Exists and DoesNotExist none."""
    values: Annotated[list[LabelValue], Field(max_length=32)] = []
    """Label values."""


class NodeFieldRequirement(KubernetesModel):
    key: Literal["metadata.name"]
    """The one field that Kubernetes knows here."""
    operator: Literal["In", "NotIn"]
    """In or NotIn."""
    values: Annotated[list[ObjectName], Field(min_length=1, max_length=1)]
    """One node's name."""


class NodeSelectorTerm(KubernetesModel):
    match_expressions: Annotated[list[NodeRequirement], Field(max_length=8)] = []
    """Requirements on the node's labels that must hold."""
    match_fields: Annotated[list[NodeFieldRequirement], Field(max_length=2)] = []
    """Requirements on the node's name that must hold."""


class NodeSelector(KubernetesModel):
    node_selector_terms: Annotated[list[NodeSelectorTerm], Field(min_length=1, max_length=8)]
    """Alternatives; one must hold."""


class PreferredNodes(KubernetesModel):
    weight: Weight
    """1 to 100."""
    preference: NodeSelectorTerm
    """Nodes that count the weight."""


class NodeAffinity(KubernetesModel):
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """Nodes that pods may run on."""
    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredNodes], Field(max_length=8)] = []
    """Nodes that pods had better run on."""


class PodAffinityTerm(KubernetesModel):
    label_selector: LabelSelector | None = None
    """Pods that are meant; none when absent."""
    topology_key: LabelKey
    """Node label whose value makes a place."""
    namespaces: Annotated[list[NamespaceName], Field(max_length=16)] = []
    """Namespaces of those pods; the service's when absent."""
    namespace_selector: LabelSelector | None = None
    """Further namespaces of those pods; all where it is empty."""


class PreferredPods(KubernetesModel):
    weight: Weight
    """1 to 100."""
    pod_affinity_term: PodAffinityTerm
    """Places that count the weight."""


class PodAffinity(KubernetesModel):
    required_during_scheduling_ignored_during_execution: Annotated[list[PodAffinityTerm], Field(max_length=8)] = []
    """Rules that must hold."""
    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredPods], Field(max_length=8)] = []
    """Rules that had better hold."""


class Affinity(KubernetesModel):
    node_affinity: NodeAffinity | None = None
    """Nodes to run on."""
    pod_affinity: PodAffinity | None = None
    """Pods to run beside."""
    pod_anti_affinity: PodAffinity | None = None
    """Pods not to run beside."""


class Unsatisfiable(StrEnum):
    DO_NOT_SCHEDULE = "DoNotSchedule"
    SCHEDULE_ANYWAY = "ScheduleAnyway"


class TopologySpreadConstraint(KubernetesModel):
    max_skew: Annotated[int, Field(ge=1, le=1000)]
    """Most pods that one place may have more than another."""
    topology_key: LabelKey
    """Node label whose value makes a place."""
    when_unsatisfiable: Unsatisfiable
    """DoNotSchedule or ScheduleAnyway."""
    label_selector: LabelSelector | None = None
    """Pods that are counted."""
    match_label_keys: Annotated[list[LabelKey], Field(max_length=8)] = []
    """Labels whose values must also be the new pod's own (`pod-template-hash` counts one revision)."""
    min_domains: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Fewest places; with DoNotSchedule only."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes that affinity excludes count."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes with taints that are not tolerated count."""
