"""What an accepted spec asks for, in the terms of children: image, revision to run, revision wanted."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.runtime_config import HotConfig, config_hash, hot_config
from outrider_crds.spec import ProfilingMode, SpeculativeServiceSpec

from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profile_store import Store, read_store
from outrider_operator.decide.revisions import Revision, current_revision, wanted_revision
from outrider_operator.decide.runtime_image import default_image, newest_image
from outrider_operator.model import Observed, Settings


@dataclass(frozen=True)
class Intent:
    spec: SpeculativeServiceSpec
    default_image: str
    newest_image: str
    """The installed release's; another than `default_image` while the service stays on an older release's."""
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

    @property
    def newer_image(self) -> str:
        """What the service could move to; empty when it runs that, or an image of its own."""
        return self.newest_image if self.image not in (self.newest_image, self.spec.pod_template.image) else ""


def intent(observed: Observed, settings: Settings, spec: SpeculativeServiceSpec) -> Intent:
    on_cpu = spec.accelerator.on_cpu
    default, newest = default_image(observed, settings, on_cpu=on_cpu), newest_image(settings, on_cpu=on_cpu)
    wanted = wanted_revision(observed, settings, spec, spec.pod_template.image or default)
    waits = spec.profiling.mode is ProfilingMode.REQUIRED and not is_profiled(observed, wanted)
    current = current_revision(observed)
    running = current if waits and (current is None or current.name != wanted.name) else wanted
    return Intent(
        spec=spec, default_image=default, newest_image=newest, wanted=wanted, running=running, hot=hot_config(spec)
    )


def store_of(observed: Observed, target_key: str) -> Store:
    return read_store(observed.profiles.get(profile_name(target_key)))


def is_profiled(observed: Observed, revision: Revision) -> bool:
    """True when target and every drafter of `revision` have been measured on every product."""
    return all(store_of(observed, keys.target).covers(keys) for keys in revision.keys)
