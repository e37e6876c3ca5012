"""What an accepted spec asks for, in the terms of children: image, revision to run, revision wanted."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.runtime_config import HotConfig, config_hash, hot_config
from outrider_crds.spec import ProfilingMode, SpeculativeServiceSpec

from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profile_store import Store, read_store
from outrider_operator.decide.reading import annotation
from outrider_operator.decide.revisions import Revision, current_revision, wanted_revision
from outrider_operator.model import Observed, Settings

IMAGE_ANNOTATION = "outrider.dev/runtime-image"
"""On the Deployment: "gpu IMAGE" or "cpu IMAGE", the default image as it was resolved for that kind of hardware."""


@dataclass(frozen=True)
class Intent:
    spec: SpeculativeServiceSpec
    default_image: str
    wanted: Revision
    """The revision of the spec."""
    running: Revision | None
    """The revision to roll out now: `wanted`, or while a required profile is missing the one before it, if any."""
    hot: HotConfig

    @property
    def held(self) -> bool:
        """True while the wanted revision waits for its profile."""
        return self.running != self.wanted

    @property
    def hot_hash(self) -> str:
        return config_hash(self.hot)

    @property
    def image(self) -> str:
        return self.spec.pod_template.image or self.default_image


def intent(observed: Observed, settings: Settings, spec: SpeculativeServiceSpec) -> Intent:
    default = default_image(observed, settings, on_cpu=spec.accelerator.on_cpu)
    wanted = wanted_revision(observed, settings, spec, spec.pod_template.image or default)
    waits = spec.profiling.mode is ProfilingMode.REQUIRED and not is_profiled(observed, wanted)
    current = current_revision(observed)
    running = current if waits and (current is None or current.name != wanted.name) else wanted
    return Intent(spec=spec, default_image=default, wanted=wanted, running=running, hot=hot_config(spec))


def default_image(observed: Observed, settings: Settings, *, on_cpu: bool) -> str:
    """The release's image when this service first needed one for its kind of hardware, and that one ever after."""
    mine, other = settings.runtime_image, settings.runtime_cpu_image
    if on_cpu:
        mine, other = other, mine
    kind, _, resolved = annotation(observed.deployment or {}, IMAGE_ANNOTATION).partition(" ")
    if resolved:
        return resolved if kind == hardware(on_cpu=on_cpu) else mine
    kept = observed.status.runtime_image
    return kept if kept and kept != other else mine


def hardware(*, on_cpu: bool) -> str:
    return "cpu" if on_cpu else "gpu"


def store_of(observed: Observed, target_key: str) -> Store:
    return read_store(observed.profiles.get(profile_name(target_key)))


def is_profiled(observed: Observed, revision: Revision) -> bool:
    """True when target and every drafter of `revision` have been measured on every product."""
    return all(store_of(observed, keys.target).covers(keys) for keys in revision.keys)
