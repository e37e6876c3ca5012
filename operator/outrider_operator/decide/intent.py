"""What an accepted spec asks for, in the terms of children: image, revision to run, revision wanted."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from outrider_crds.runtime_config import HotConfig, config_hash, hot_config
from outrider_crds.spec import Drafter, ProfilingMode, SpeculativeServiceSpec

from outrider_operator.decide.ownership import Children
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profile_store import Profiles
from outrider_operator.decide.revisions import Revision, current_revision, stored_revisions, wanted_revision
from outrider_operator.decide.rollout_gate import Gate
from outrider_operator.decide.runtime_image import newest_image
from outrider_operator.model import Object, Settings


@dataclass(frozen=True)
class Intent:
    spec: SpeculativeServiceSpec
    default_image: str
    """The release's image that `wanted` is given."""
    given_image: str
    """The one that the revision before it was given."""
    newest_image: str
    """The installed release's; another than `default_image` while the service stays on an older release's."""
    stored: tuple[Revision, ...]
    """The revisions whose ConfigMaps are there."""
    wanted: Revision
    """The revision of the spec."""
    running: Revision | None
    """The revision to roll out now: `wanted`, or while that has to wait the one before it, if any."""
    hot: HotConfig
    gate: Gate
    """What of a rollout's first new pod is known."""
    ready_revision: str = ""
    """The newest revision that had a ready pod."""
    surrendered: int = 0
    """Pods that make room for a draft canary's."""
    unready_canaries: int = 0
    """Pods of a draft canary that are not ready."""

    @property
    def replicas(self) -> int:
        """Pods of the Deployment."""
        return self.spec.replicas - self.surrendered

    @property
    def held(self) -> bool:
        """True while the wanted revision has to wait."""
        return self.running != self.wanted

    @property
    def hot_hash(self) -> str:
        return config_hash(self.hot)

    @property
    def image(self) -> str:
        return self.spec.pod_template.image or self.default_image

    @property
    def running_image(self) -> str:
        """The release's image that `running` was given."""
        return self.default_image if self.running in (None, self.wanted) else self.given_image

    @property
    def newer_image(self) -> str:
        """What the service could move to; empty when it runs that, or an image of its own."""
        is_behind = not self.spec.pod_template.image and self.running_image != self.newest_image
        return self.newest_image if is_behind else ""


@dataclass(frozen=True)
class RolloutEvidence:
    """What pods and nodes show of a rollout."""

    ready_revision: str
    """The newest revision that had a ready pod; empty before the first."""
    ready_now: frozenset[str]
    """Revisions that have a ready pod."""
    with_node: frozenset[str]
    """Products that a node has."""
    gate: Gate

    @property
    def proven(self) -> frozenset[str]:
        """Revisions that have had a ready pod."""
        return self.ready_now | {self.ready_revision}


def intent(
    children: Children,
    image: str,
    given: str,
    replica_sets: Iterable[Object],
    profiles: Profiles,
    settings: Settings,
    spec: SpeculativeServiceSpec,
    evidence: RolloutEvidence,
    *,
    is_legible: bool,
) -> Intent:
    """`image` is for the spec where its pod template names none; `given` is what the service had so far, or empty.

    A spec that is not legible asks for the revision that runs: what it says of pods is not known.
    """
    stored = stored_revisions(children, replica_sets)
    current = None if is_legible else current_revision(children, stored)
    pod_image = spec.pod_template.image or image
    wanted = current or wanted_revision(children, stored, settings, spec, pod_image, evidence.proven)
    newest = newest_image(settings, on_cpu=spec.accelerator.on_cpu)
    asked = Intent(
        spec=spec,
        default_image=image,
        given_image=given or image,
        newest_image=newest,
        stored=stored,
        wanted=wanted,
        running=wanted,
        hot=hot_config(spec, _boot_pools((wanted, *stored), {wanted.name, *evidence.gate.serving})),
        gate=evidence.gate,
        ready_revision=evidence.ready_revision,
    )
    waits = spec.profiling.mode is ProfilingMode.REQUIRED and not is_profiled(profiles, wanted, evidence.with_node)
    return held(asked, children) if waits else asked


def _boot_pools(revisions: Iterable[Revision], names: Container[str]) -> list[list[Drafter]]:
    """Pools at boot of the pods that read the one hot config: during a rollout those of old pods too."""
    return [revision.boot.draft_pool for revision in revisions if revision.name in names]


def held(asked: Intent, children: Children) -> Intent:
    """`asked` while the wanted revision has to wait: the one before it stays, at the scale of the spec.

    A revision that runs already is not taken back.
    """
    current = current_revision(children, asked.stored)
    return asked if current is not None and current.name == asked.wanted.name else replace(asked, running=current)


def unread_profiles(profiles: Profiles, revision: Revision) -> list[str]:
    """Names of the profiles of `revision` that are there and whose contents were not shown."""
    names = (profile_name(keys.target) for keys in revision.keys)
    there = profiles.documents
    return [name for name in names if name in there and "data" not in there[name]]


def is_profiled(profiles: Profiles, revision: Revision, with_node: Container[str]) -> bool:
    """True when target and every drafter of `revision` have been measured on every product that pods can land on now;
    on every one where no node fits any."""
    usable = [keys for keys in revision.keys if keys.product in with_node] or revision.keys
    return all(profiles.store(keys.target).covers(keys) for keys in usable)
