"""The desired state of a service's children: runtime image, revision of the spec, revision to run.

A new operator restarts no serving pod: a service stays on the image that it started with. It moves by an ordinary
rollout once its annotation names a new image, or once it falls into the share of services that is upgraded.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from outrider_crds.base import digest
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.names import Image
from outrider_crds.runtime_config import HotConfig, config_hash, hot_config
from outrider_crds.spec import ProfilingMode, SpeculativeServiceSpec
from pydantic import TypeAdapter, ValidationError

from outrider_operator.cluster_model import Object, OperatorSettings
from outrider_operator.decide.desired.profile_store import Profiles
from outrider_operator.decide.desired.revisions import Revision, current_revision
from outrider_operator.decide.desired.rollout_gate import Gate, gate_of
from outrider_operator.decide.desired.service_world import ServiceWorld, stored_hot, with_unknown_drafters
from outrider_operator.decide.desired.wanted_revision import wanted_revision
from outrider_operator.decide.ownership import Children
from outrider_operator.validation.reading import annotation, dig, uid_of

IMAGE_ANNOTATION = "outrider.dev/runtime-image"
"""Annotation of the Deployment: "gpu IMAGE" or "cpu IMAGE", the release image of the revision that it runs."""
UPGRADE_ANNOTATION = "outrider.dev/runtime-upgrade"
"""Annotation of the service: an image, or its tag, that the service moves to once that is installed; "false" keeps it
out of the share. It names one image, so that no later release moves the service by it."""
_IMAGE: TypeAdapter[str] = TypeAdapter(Image)


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


@dataclass(frozen=True)
class RuntimeImages:
    """Release images of a service whose pod template names none."""

    pinned: str
    """Image for the revision of the spec."""
    previous: str
    """Image of the revision before it; `pinned` for a new service."""
    installed: str
    """Image of the installed release. It differs from `pinned` while the service stays on an older release."""
    waiting: str = ""
    """Image that the service moves to once a draft canary is over; empty without one."""


def runtime_images(
    service: Object,
    deployment: Object | None,
    canary: Object | None,
    recorded: str,
    settings: OperatorSettings,
    *,
    on_cpu: bool,
) -> RuntimeImages:
    """Images of `service`. An upgrade waits for the end of a draft canary.

    deployment, canary: the service's own Deployments. recorded: image in its status; empty for a new service.
    """
    next_image = pinned_image(service, deployment, recorded, settings, on_cpu=on_cpu)
    pinned = _canary_image(canary, on_cpu=on_cpu) or next_image
    waiting = "" if next_image == pinned else next_image
    previous = _resolved(deployment)[1] or recorded or pinned
    return RuntimeImages(pinned, previous, installed_image(settings, on_cpu=on_cpu), waiting)


def pinned_image(
    service: Object, deployment: Object | None, recorded: str, settings: OperatorSettings, *, on_cpu: bool
) -> str:
    """Release image for the revision of the spec, without a draft canary."""
    if _moves(service, settings, on_cpu=on_cpu):
        return installed_image(settings, on_cpu=on_cpu)
    return _first_image(deployment, recorded, settings, on_cpu=on_cpu)


def _canary_image(canary: Object | None, *, on_cpu: bool) -> str:
    """Image that a draft canary was started with; empty without one."""
    kind, resolved = _resolved(canary)
    return resolved if kind == hardware(on_cpu=on_cpu) else ""


def installed_image(settings: OperatorSettings, *, on_cpu: bool) -> str:
    """Image of the installed release."""
    return settings.runtime_image_cpu if on_cpu else settings.runtime_image_gpu


def hardware(*, on_cpu: bool) -> str:
    return "cpu" if on_cpu else "gpu"


def _first_image(deployment: Object | None, recorded: str, settings: OperatorSettings, *, on_cpu: bool) -> str:
    """Release image from the time when this service first needed one for its kind of hardware."""
    installed = installed_image(settings, on_cpu=on_cpu)
    kind, resolved = _resolved(deployment)
    if resolved:
        return resolved if kind == hardware(on_cpu=on_cpu) else installed
    return recorded if recorded and recorded != installed_image(settings, on_cpu=not on_cpu) else installed


def _resolved(deployment: Object | None) -> tuple[str, str]:
    """(hardware, image) in the annotation; two empty strings without one."""
    kind, _, resolved = annotation(deployment or {}, IMAGE_ANNOTATION).partition(" ")
    return (kind, resolved) if _is_image(resolved) else ("", "")


def _is_image(image: str) -> bool:
    """Does the CRD accept `image`? Anyone may write the annotation, and the status shows it."""
    try:
        _IMAGE.validate_python(image)
    except ValidationError:
        return False
    return True


def _moves(service: Object, settings: OperatorSettings, *, on_cpu: bool) -> bool:
    """Does the service move to the installed image? A paused one does not: its pods would stay on the old image."""
    if dig(service, "spec", "paused"):
        return False
    choice = annotation(service, UPGRADE_ANNOTATION)
    if choice == "false":
        return False
    installed = installed_image(settings, on_cpu=on_cpu)
    return choice in (installed, _tag(installed)) or upgrade_rank(uid_of(service)) < settings.runtime_upgrade_percent


def _tag(image: str) -> str:
    """Tag of an image; the whole image if it has a digest or no tag."""
    tag = image.rpartition("/")[2].partition(":")[2]
    return image if "@" in image or not tag else tag


def upgrade_rank(uid: str) -> int:
    """Fixed number from 0 to 99 for a service: a larger share contains every service of a smaller one."""
    return int(digest({"uid": uid}), 16) % 100
