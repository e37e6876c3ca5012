"""Which of the releases' runtime images a service runs on, and when it moves to the installed release's.

A new operator restarts no serving pod: a service stays on the image that it was given first. It moves by an ordinary
rollout once its annotation asks for it, or once it falls into the share that the installation upgrades.
"""

from __future__ import annotations

from outrider_crds.base import digest
from outrider_crds.names import Image
from pydantic import TypeAdapter, ValidationError

from outrider_operator.inbound.reading import annotation, dig, uid_of
from outrider_operator.model import Object, Settings

IMAGE_ANNOTATION = "outrider.dev/runtime-image"
"""On the Deployment: "gpu IMAGE" or "cpu IMAGE", the default image as it was resolved for that kind of hardware
when the revision that the Deployment runs was made."""
UPGRADE_ANNOTATION = "outrider.dev/runtime-upgrade"
"""On the service: an image, or its tag, moves it there once the installed release has it; "false" keeps it out of the
share. It names one image, so that no later release moves the service by it."""
_IMAGE: TypeAdapter[str] = TypeAdapter(Image)


def default_image(
    service: Object, deployment: Object | None, kept_image: str, settings: Settings, *, on_cpu: bool
) -> str:
    """The image that `service` runs on where its pod template names none.

    `deployment` is the service's own; `kept_image` is its status's, empty for a new service.
    """
    newest = newest_image(settings, on_cpu=on_cpu)
    return (
        newest if _moves(service, settings, on_cpu=on_cpu) else _given(deployment, kept_image, settings, on_cpu=on_cpu)
    )


def given_image(deployment: Object | None, kept_image: str) -> str:
    """The image that the revision of `deployment` was given; empty for a service that never had one."""
    return _resolved(deployment)[1] or kept_image


def canary_image(canary: Object | None, *, on_cpu: bool) -> str:
    """The image that a draft canary was started with: an upgrade waits for its end. Empty without one."""
    kind, resolved = _resolved(canary)
    return resolved if kind == hardware(on_cpu=on_cpu) else ""


def newest_image(settings: Settings, *, on_cpu: bool) -> str:
    """The installed release's."""
    return settings.runtime_cpu_image if on_cpu else settings.runtime_image


def hardware(*, on_cpu: bool) -> str:
    return "cpu" if on_cpu else "gpu"


def _given(deployment: Object | None, kept_image: str, settings: Settings, *, on_cpu: bool) -> str:
    """The release's image when this service first needed one for its kind of hardware."""
    newest = newest_image(settings, on_cpu=on_cpu)
    kind, resolved = _resolved(deployment)
    if resolved:
        return resolved if kind == hardware(on_cpu=on_cpu) else newest
    return kept_image if kept_image and kept_image != newest_image(settings, on_cpu=not on_cpu) else newest


def _resolved(deployment: Object | None) -> tuple[str, str]:
    """(hardware, image) of the annotation; two empty strings where it holds none."""
    kind, _, resolved = annotation(deployment or {}, IMAGE_ANNOTATION).partition(" ")
    return (kind, resolved) if _is_image(resolved) else ("", "")


def _is_image(given: str) -> bool:
    """Anyone may write an annotation; the status takes no other image than the CRD does."""
    try:
        _IMAGE.validate_python(given)
    except ValidationError:
        return False
    return True


def _moves(service: Object, settings: Settings, *, on_cpu: bool) -> bool:
    """A paused service does not: no rollout would take its pods along."""
    if dig(service, "spec", "paused"):
        return False
    choice, newest = annotation(service, UPGRADE_ANNOTATION), newest_image(settings, on_cpu=on_cpu)
    if choice == "false":
        return False
    return choice in (newest, _tag(newest)) or place(uid_of(service)) < settings.runtime_upgrade_percent


def _tag(image: str) -> str:
    """The release in an image's name; the image itself where it has a digest or no tag."""
    tag = image.rpartition("/")[2].partition(":")[2]
    return image if "@" in image or not tag else tag


def place(uid: str) -> int:
    """0 to 99, the same for ever: a larger share holds all services of a smaller one."""
    return int(digest({"uid": uid}), 16) % 100
