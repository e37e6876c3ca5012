"""Which of the releases' runtime images a service runs on, and when it moves to the installed release's.

A new operator restarts no serving pod: a service stays on the image that it was given first. It moves by an ordinary
rollout once its annotation asks for it, or once it falls into the share that the installation upgrades.
"""

from __future__ import annotations

from outrider_crds.base import digest

from outrider_operator.decide.reading import annotation
from outrider_operator.model import Observed, Settings

IMAGE_ANNOTATION = "outrider.dev/runtime-image"
"""On the Deployment: "gpu IMAGE" or "cpu IMAGE", the default image as it was resolved for that kind of hardware."""
UPGRADE_ANNOTATION = "outrider.dev/runtime-upgrade"
"""On the service: "true" moves it to the installed release's image, "false" keeps it out of the share."""


def default_image(observed: Observed, settings: Settings, *, on_cpu: bool) -> str:
    """The image that the service runs on where its pod template names none."""
    newest = newest_image(settings, on_cpu=on_cpu)
    return newest if _moves(observed, settings) else _given(observed, settings, newest, on_cpu=on_cpu)


def newest_image(settings: Settings, *, on_cpu: bool) -> str:
    """The installed release's."""
    return settings.runtime_cpu_image if on_cpu else settings.runtime_image


def hardware(*, on_cpu: bool) -> str:
    return "cpu" if on_cpu else "gpu"


def _given(observed: Observed, settings: Settings, newest: str, *, on_cpu: bool) -> str:
    """The release's image when this service first needed one for its kind of hardware."""
    kind, _, resolved = annotation(observed.deployment or {}, IMAGE_ANNOTATION).partition(" ")
    if resolved:
        return resolved if kind == hardware(on_cpu=on_cpu) else newest
    kept = observed.status.runtime_image
    return kept if kept and kept != newest_image(settings, on_cpu=not on_cpu) else newest


def _moves(observed: Observed, settings: Settings) -> bool:
    asked = annotation(observed.service, UPGRADE_ANNOTATION)
    if asked in ("true", "false"):
        return asked == "true"
    return _place(observed.uid) < settings.runtime_upgrade_percent


def _place(uid: str) -> int:
    """0 to 99, the same for ever: a larger share holds all services of a smaller one."""
    return int(digest({"uid": uid}), 16) % 100
