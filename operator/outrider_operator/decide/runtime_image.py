"""Choose the runtime image of a service, and decide when it moves to the installed release's image.

A new operator restarts no serving pod: a service stays on the image that it started with. It moves by an ordinary
rollout once its annotation names a new image, or once it falls into the share of services that is upgraded.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.base import digest
from outrider_crds.names import Image
from pydantic import TypeAdapter, ValidationError

from outrider_operator.cluster_model import Object, OperatorSettings
from outrider_operator.validation.reading import annotation, dig, uid_of

IMAGE_ANNOTATION = "outrider.dev/runtime-image"
"""Annotation of the Deployment: "gpu IMAGE" or "cpu IMAGE", the release image of the revision that it runs."""
UPGRADE_ANNOTATION = "outrider.dev/runtime-upgrade"
"""Annotation of the service: an image, or its tag, that the service moves to once that is installed; "false" keeps it
out of the share. It names one image, so that no later release moves the service by it."""
_IMAGE: TypeAdapter[str] = TypeAdapter(Image)


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
