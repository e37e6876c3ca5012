"""What was observed of one service, indexed once for all concerns.

Of a spec that this release does not understand the usable parts count: scale, kill switch and SLO classes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outrider_crds.rules import violations
from outrider_crds.runtime_config import CONFIG_KEY, HotConfig
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.spec import ProfilingMode, SpeculativeServiceSpec
from pydantic import ValidationError

from outrider_operator.cluster_model import (
    CANARY_TRACK,
    CONFIG_MAP,
    PODLESS_FIELDS,
    TRACK_LABEL,
    Object,
    Observed,
    OperatorSettings,
    hot_map_name,
    is_over_nodes,
)
from outrider_operator.decide.desired.profile_store import Profiles
from outrider_operator.decide.desired.revisions import Revision, current_revision, ready_revision, stored_revisions
from outrider_operator.decide.ownership import Children
from outrider_operator.decide.pod_spec.placement import has_node
from outrider_operator.decide.pods.pod_states import Pods, pods_of, revision_of
from outrider_operator.decide.pods.unreachable_pods import why_unreachable
from outrider_operator.validation.reading import items, label, name_of, text

_NEEDED = ("replicas", "paused", "speculation", "sloClasses", "defaultSLOClass")
"""Fields that must be readable, or in force already: a default in their place would change what pods do."""


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

    def _pods(self, deployment: Object | None, *, is_canary: bool) -> Pods:
        observed = self.observed
        pods = [pod for pod in observed.pods if (label(pod, TRACK_LABEL) == CANARY_TRACK) is is_canary]
        workers = () if is_canary else observed.workers
        return pods_of(deployment, pods, observed.warnings, observed.at, observed.provisioning, workers)


def readable_spec(spec: Object, running: Revision, hot: HotConfig | None) -> SpeculativeServiceSpec | None:
    """Combine the fields of `spec` that make no revision with the pool, hardware and engine of `running`.

    A value that cannot be read stays as it is in force. None if one of these fields has none, or if the trimmed copy of
    a large spec lacks it. hot: the config that the pods of `running` mount.
    """
    if "replicas" not in spec:
        return None
    boot, in_force = running.boot.wire(), _in_force(hot)
    fields = {name: boot[name] for name in ("target", "accelerator", "engine")}
    fields["draftPool"] = _pool(boot.get("draftPool", []), spec, hot)
    for name in (name for name in PODLESS_FIELDS if name in spec):
        if _fits({**fields, name: spec[name]}, name):
            fields[name] = spec[name]
        elif name in in_force:
            fields[name] = _readable_parts(fields, name, spec[name], in_force[name])
        elif name in _NEEDED:
            return None
    return _spec_of(fields)


def with_unknown_drafters(hot: HotConfig, spec: Object, running: Revision, mounted: HotConfig | None) -> HotConfig:
    """`hot`, plus pauses of drafters that pods of `running` may host and that this release does not know."""
    known = {drafter.name for drafter in running.boot.draft_pool}
    written = {text(drafter, "name"): drafter for drafter in items(spec, "draftPool")}
    paused = (mounted.paused_drafters or []) if mounted is not None else []
    unknown = [name for name in dict.fromkeys([*written, *paused]) if name not in known]
    both = [*(hot.paused_drafters or []), *(name for name in unknown if _is_paused(name, written, paused))]
    return hot.model_copy(update={"paused_drafters": both or None})


def _in_force(hot: HotConfig | None) -> dict[str, Any]:
    """Fields of a spec, as pods have them."""
    if hot is None:
        return {}
    wire = hot.wire()
    speculation = {name: wire[name] for name in ("mode", "draftPrefill", "maxDraftTokens") if name in wire}
    classes = {"sloClasses": wire.get("sloClasses", []), "defaultSLOClass": wire.get("defaultSLOClass")}
    return {"speculation": speculation, **classes}


def _readable_parts(fields: dict[str, Any], name: str, value: Any, in_force: Any) -> Any:
    """What is in force, with the parts of `value` that can be read: `mode: "Off"` counts next to an unknown field."""
    for key, part in value.items() if isinstance(value, dict) and isinstance(in_force, dict) else ():
        both = {**in_force, key: part}
        in_force = both if _fits({**fields, name: both}, name) else in_force
    return in_force


def _fits(fields: dict[str, Any], name: str) -> bool:
    parsed = _spec_of(fields)
    return parsed is not None and all(_field(sentence) != name for sentence in violations(parsed, "spec"))


def stored_hot(children: Children) -> HotConfig | None:
    """The hot config that pods mount; None if it is missing or cannot be read."""
    try:
        return HotConfig.read(text(children.own(CONFIG_MAP, hot_map_name(children.owner.name)), "data", CONFIG_KEY))
    except ValidationError:
        return None


def _pool(booted: list[Object], spec: Object, hot: HotConfig | None) -> list[Object]:
    """The drafters that run. Order and pauses come from `spec`, or from `hot` for drafters that `spec` lacks."""
    written = {text(drafter, "name"): drafter for drafter in items(spec, "draftPool")}
    paused = set(hot.paused_drafters or ()) if hot is not None else set()
    carried = [name for name in (hot.drafter_order or () if hot is not None else ()) if name not in written]
    order = {name: place for place, name in enumerate([*written, *carried])}
    pool = [{**drafter, "paused": _is_paused(drafter["name"], written, paused)} for drafter in booted]
    return sorted(pool, key=lambda drafter: order.get(drafter["name"], len(order)))


def _is_paused(name: str, written: Mapping[str, Object], paused: Container[str]) -> bool:
    drafter = written.get(name)
    said = (drafter.get("paused") or False) if drafter is not None else None
    return said if isinstance(said, bool) else name in paused


def _spec_of(fields: dict[str, Any]) -> SpeculativeServiceSpec | None:
    try:
        return SpeculativeServiceSpec.model_validate(fields, extra="ignore")
    except ValidationError:
        return None


def _field(sentence: str) -> str:
    """First field of a violation: "speculation" in "spec.speculation.mode: ..."."""
    return sentence.partition(":")[0].removeprefix("spec.").partition(".")[0].partition("[")[0]
