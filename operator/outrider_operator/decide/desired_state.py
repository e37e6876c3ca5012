"""The desired state of a service's children: runtime image, revision of the spec, revision to run."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.runtime_config import HotConfig, config_hash, hot_config
from outrider_crds.spec import ProfilingMode, SpeculativeServiceSpec

from outrider_operator.cluster_model import Object, OperatorSettings
from outrider_operator.decide.ownership import Children
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profile_store import Profiles
from outrider_operator.decide.revisions import Revision, current_revision, stored_revisions, wanted_revision
from outrider_operator.decide.rollout_gate import Gate
from outrider_operator.decide.runtime_image import RuntimeImages


@dataclass(frozen=True)
class DesiredState:
    spec: SpeculativeServiceSpec
    images: RuntimeImages
    stored: tuple[Revision, ...]
    """Revisions whose ConfigMaps exist."""
    spec_revision: Revision
    """Revision of the spec."""
    running: Revision | None
    """Revision that the Deployment should run now: `spec_revision`, or the one before it while that must wait."""
    hot: HotConfig
    gate: Gate
    """State of the rollout's gate: what its first new pod reports."""
    ready_revision: str = ""
    """Newest revision that had a ready pod."""
    surrendered: int = 0
    """Pods of the Deployment that make room for a draft canary's."""
    unready_canaries: int = 0
    """Pods of a draft canary that are not ready."""

    @property
    def replicas(self) -> int:
        """Pods of the Deployment."""
        return self.spec.replicas - self.surrendered

    @property
    def is_waiting(self) -> bool:
        """True while the revision of the spec must wait."""
        return self.running != self.spec_revision

    @property
    def hot_hash(self) -> str:
        return config_hash(self.hot)

    @property
    def image(self) -> str:
        """Image of the runtime container in pods of `spec_revision`."""
        return self.spec.pod_template.image or self.images.pinned

    @property
    def running_image(self) -> str:
        """Release image of `running`."""
        return self.images.pinned if self.running in (None, self.spec_revision) else self.images.previous

    @property
    def newer_image(self) -> str:
        """Image that the service could move to; empty if it runs that already, or an image of its own."""
        is_behind = not self.spec.pod_template.image and self.running_image != self.images.installed
        return self.images.installed if is_behind else ""


@dataclass(frozen=True)
class RolloutEvidence:
    """What pods and nodes say about a rollout."""

    ready_revision: str
    """Newest revision that had a ready pod; empty before the first."""
    ready_now: frozenset[str]
    """Revisions that have a ready pod."""
    with_node: frozenset[str]
    """Products for which a fitting node exists."""
    gate: Gate

    @property
    def proven(self) -> frozenset[str]:
        """Revisions that have had a ready pod."""
        return self.ready_now | {self.ready_revision}


def desired_state(
    children: Children,
    images: RuntimeImages,
    replica_sets: Iterable[Object],
    profiles: Profiles,
    settings: OperatorSettings,
    spec: SpeculativeServiceSpec,
    evidence: RolloutEvidence,
    *,
    is_legible: bool,
) -> DesiredState:
    """Derive the desired state from `spec` and what exists already.

    is_legible: this release understands the whole spec. If not, the current revision stays.
    """
    stored = stored_revisions(children, replica_sets)
    current = None if is_legible else current_revision(children, stored)
    pod_image = spec.pod_template.image or images.pinned
    spec_revision = current or wanted_revision(children, stored, settings, spec, pod_image, evidence.proven)

    desired = DesiredState(
        spec=spec,
        images=images,
        stored=stored,
        spec_revision=spec_revision,
        running=spec_revision,
        hot=hot_config(spec, _boot_pools((spec_revision, *stored), {spec_revision.name, *evidence.gate.serving})),
        gate=evidence.gate,
        ready_revision=evidence.ready_revision,
    )
    waits = spec.profiling.mode is ProfilingMode.REQUIRED and not is_profiled(
        profiles, spec_revision, evidence.with_node
    )
    return keep_current(desired, children) if waits else desired


def _boot_pools(revisions: Iterable[Revision], names: Container[str]) -> list[list[DrafterSpec]]:
    """Draft pools that pods booted with. During a rollout old and new pods read the same hot config."""
    return [revision.boot.draft_pool for revision in revisions if revision.name in names]


def keep_current(desired: DesiredState, children: Children) -> DesiredState:
    """Keep the current revision, at the spec's scale, while the revision of the spec must wait.

    A revision that runs already is not taken back.
    """
    current = current_revision(children, desired.stored)
    return (
        desired
        if current is not None and current.name == desired.spec_revision.name
        else replace(desired, running=current)
    )


def unread_profiles(profiles: Profiles, revision: Revision) -> list[str]:
    """Names of profile ConfigMaps of `revision` that exist, but whose contents were not read yet."""
    names = (profile_name(keys.target) for keys in revision.keys)
    there = profiles.documents
    return [name for name in names if name in there and "data" not in there[name]]


def is_profiled(profiles: Profiles, revision: Revision, with_node: Container[str]) -> bool:
    """True if target and drafters of `revision` are measured on every product that a node offers now.

    If no node fits any product, all products count.
    """
    usable = [keys for keys in revision.keys if keys.product in with_node] or revision.keys
    return all(profiles.store(keys.target).covers(keys) for keys in usable)
