"""What was observed of one service, indexed once for all concerns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from outrider_crds.conditions import find_condition
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.spec import ProfilingMode, SpeculativeServiceSpec
from outrider_crds.status import Condition, ConditionType

from outrider_operator.cluster_model import CANARY_TRACK, TRACK_LABEL, Object, Observed, OperatorSettings, is_over_nodes
from outrider_operator.decide.ownership import Children
from outrider_operator.decide.pod_spec.placement import has_node
from outrider_operator.decide.pod_states import Pods, pods_of, revision_of
from outrider_operator.decide.profile_store import Profiles
from outrider_operator.decide.readable_spec import readable_spec, stored_hot
from outrider_operator.decide.revisions import Revision, current_revision, ready_revision, stored_revisions
from outrider_operator.decide.unreachable_pods import why_unreachable
from outrider_operator.validation.reading import label, name_of


@dataclass(frozen=True)
class ServiceWorld:
    observed: Observed
    settings: OperatorSettings

    @property
    def at(self) -> float:
        """Unix seconds."""
        return self.observed.at

    @cached_property
    def children(self) -> Children:
        over_nodes = is_over_nodes(self.observed.service)
        return Children(self.observed.identity, self.observed.children, over_nodes=over_nodes)

    @cached_property
    def stored(self) -> tuple[Revision, ...]:
        """Revisions whose ConfigMaps exist."""
        return stored_revisions(self.children, self.observed.replica_sets)

    @cached_property
    def profiles(self) -> Profiles:
        """Profiles of the service's namespace."""
        return Profiles(self.observed.profiles)

    @property
    def unreadable_reason(self) -> str:
        """Why this release cannot read the spec as a whole; empty if it can."""
        return self.observed.parsed if isinstance(self.observed.parsed, str) else ""

    @cached_property
    def spec(self) -> SpeculativeServiceSpec | None:
        """The spec, or its usable parts; None if no revision runs that could complete them."""
        if not isinstance(self.observed.parsed, str):
            return self.observed.parsed
        running = current_revision(self.children, self.stored)
        if running is None:
            return None
        return readable_spec(self.observed.service.get("spec") or {}, running, stored_hot(self.children))

    @cached_property
    def pods(self) -> Pods:
        """Serving pods, without those of a draft canary."""
        return self._pods(self.children.workload, is_canary=False)

    @cached_property
    def canary_pods(self) -> Pods:
        return self._pods(self.children.canary, is_canary=True)

    @cached_property
    def states(self) -> Mapping[str, RuntimeState]:
        """Name of a ready serving pod -> its last report."""
        names = (name_of(pod) for pod in self.pods.ready)
        return {name: self.observed.states[name] for name in names if name in self.observed.states}

    @cached_property
    def unreachable(self) -> str:
        """Sentence about a ready pod that does not answer the operator; empty if all do."""
        return why_unreachable(self.observed.unreachable, self.pods.ready, self.observed.network_policies)

    @cached_property
    def ready_now(self) -> frozenset[str]:
        """Revisions that have a ready pod."""
        return frozenset(revision_of(pod) for pod in self.pods.ready)

    @cached_property
    def ready_revision(self) -> str:
        """Newest revision that had a ready pod; empty before the first."""
        return ready_revision(self.children, self.observed.status.ready_revision, self.ready_now)

    @property
    def proven(self) -> frozenset[str]:
        """Revisions that have had a ready pod."""
        return self.ready_now | {self.ready_revision}

    def products_with_node(self, spec: SpeculativeServiceSpec) -> frozenset[str]:
        """Products for which a node exists. All, without looking, unless a rollout waits for several profiles."""
        products = spec.accelerator.products
        if spec.profiling.mode is not ProfilingMode.REQUIRED or len(products) == 1:
            return frozenset(products)
        tolerations = self.pods.tolerations
        return frozenset(name for name in products if has_node(self.observed.nodes, spec, name, tolerations))

    def last_condition(self, kind: ConditionType) -> Condition | None:
        """The condition in the last status."""
        return find_condition(self.observed.status.conditions, kind)

    def _pods(self, deployment: Object | None, *, is_canary: bool) -> Pods:
        observed = self.observed
        pods = [pod for pod in observed.pods if (label(pod, TRACK_LABEL) == CANARY_TRACK) is is_canary]
        workers = () if is_canary else observed.workers
        return pods_of(deployment, pods, observed.warnings, observed.at, observed.provisioning, workers)
