"""The desired state of a service's children: runtime image, revision of the spec, revision to run."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.runtime_config import HotConfig, config_hash, hot_config
from outrider_crds.spec import ProfilingMode, SpeculativeServiceSpec

from outrider_operator.decide.ownership import Children
from outrider_operator.decide.profile_store import Profiles
from outrider_operator.decide.readable_spec import stored_hot, with_unknown_drafters
from outrider_operator.decide.revisions import Revision, current_revision
from outrider_operator.decide.rollout_gate import Gate, gate_of
from outrider_operator.decide.runtime_image import RuntimeImages, runtime_images
from outrider_operator.decide.service_world import ServiceWorld
from outrider_operator.decide.wanted_revision import wanted_revision


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


def desired_state(world: ServiceWorld, spec: SpeculativeServiceSpec) -> DesiredState:
    """Derive the desired state from `spec` and what exists already.

    If this release does not understand the whole spec, the current revision stays.
    """
    children, stored, images = world.children, world.stored, _images(world, spec)
    gate = gate_of(children, world.observed.replica_sets, world.pods, world.observed.states, spec)
    current = current_revision(children, stored) if world.unreadable_reason else None
    image = spec.pod_template.image or images.pinned
    spec_revision = current or wanted_revision(children, stored, world.settings, spec, image, world.proven)
    hot = hot_config(spec, _boot_pools((spec_revision, *stored), {spec_revision.name, *gate.serving}))
    if current is not None:
        hot = with_unknown_drafters(hot, world.observed.service.get("spec") or {}, current, stored_hot(children))
    desired = DesiredState(
        spec=spec,
        images=images,
        stored=stored,
        spec_revision=spec_revision,
        running=spec_revision,
        hot=hot,
        gate=gate,
        ready_revision=world.ready_revision,
    )
    return keep_current(desired, children) if _waits_for_profile(world, desired) else desired


def _images(world: ServiceWorld, spec: SpeculativeServiceSpec) -> RuntimeImages:
    children, recorded = world.children, world.observed.status.runtime_image
    service, on_cpu = world.observed.service, spec.accelerator.on_cpu
    return runtime_images(service, children.workload, children.canary, recorded, world.settings, on_cpu=on_cpu)


def _waits_for_profile(world: ServiceWorld, desired: DesiredState) -> bool:
    spec, revision = desired.spec, desired.spec_revision
    is_required = spec.profiling.mode is ProfilingMode.REQUIRED
    return is_required and not is_profiled(world.profiles, revision, world.products_with_node(spec))


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


def is_profiled(profiles: Profiles, revision: Revision, with_node: Container[str]) -> bool:
    """True if target and drafters of `revision` are measured on every product that a node offers now.

    If no node fits any product, all products count.
    """
    usable = [keys for keys in revision.keys if keys.product in with_node] or revision.keys
    return all(profiles.store(keys.target).covers(keys) for keys in usable)
