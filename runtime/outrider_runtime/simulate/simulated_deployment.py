"""A service on hardware: its step times, and the recorded proposals of its drafters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate import recording as recordings
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.recording import Recording
from outrider_runtime.simulate.replay.step_scheduler import Limits
from outrider_runtime.simulate.service_manifest import DRAFT, LOOKUP, Member, Service
from outrider_runtime.simulate.worlds import profiled
from outrider_runtime.simulate.worlds import world as worlds
from outrider_runtime.simulate.worlds.compose import RECIPES, Recipe, compose
from outrider_runtime.simulate.worlds.named_models import find_shape
from outrider_runtime.simulate.worlds.shapes import ModelShape
from outrider_runtime.simulate.worlds.world import BlockPass, DrafterTimes, Passes, World

DEFAULT_ACCEPTANCE = 0.7
"""Acceptance rate that is typical for drafts of Llama models (TurboSpec, section 3)."""


@dataclass(frozen=True, slots=True, eq=False)
class Deployment:
    service: Service
    world: World
    """Step times, with drafters under the pool's names."""
    recording: Recording
    """Proposals, with drafters under the pool's names."""
    drafters: tuple[Drafter, ...]
    """Drafters of the pool whose step times are known."""
    acceptance: Mapping[str, float | None]
    """Acceptance rate of first proposals, by drafter with a model; None: as recorded."""
    limits: Limits
    notices: tuple[str, ...]


def find_world(service: Service, system: str) -> World:
    """Return step times on a system that NVIDIA measured: a shipped world if one fits, else a composed one.

    Raises SimulationError if they cannot be composed.
    """
    recipe = Recipe(service.name, system, service.gpus, find_shape(service.target), service.target, _drafts(service))
    shipped = next((candidate for candidate in RECIPES if candidate.covers(recipe)), None)
    return worlds.load(shipped.name) if shipped else worlds.parse_world(compose(recipe))


def load_profiled_world(name_or_file: str) -> World:
    """Load a shipped world, or a result of outrider-profile. Raises SimulationError for anything else."""
    path = Path(name_or_file)
    return profiled.load(path) if path.is_file() else worlds.load(name_or_file)


def deploy(service: Service, world: World, acceptance: Mapping[str, float | None]) -> Deployment:
    """Put a service on hardware. acceptance: by drafter; the default is DEFAULT_ACCEPTANCE.

    Raises SimulationError if the world has none of the pool's drafters, or `acceptance` names an unknown drafter.
    """
    parts = _parts(service, world)
    pool = [member for member in service.pool if parts[member.drafter.name] in world.drafters]
    unknown = [member.drafter.name for member in service.pool if member not in pool]
    if unknown and not pool:
        raise SimulationError(f"{world.name} has step times for {_list_names(world.drafters)} only, none of the pool's")
    names = [member.drafter.name for member in pool]
    _check(acceptance, [member.drafter.name for member in pool if member.recorded_as != LOOKUP])
    shares = {name: acceptance.get(name, DEFAULT_ACCEPTANCE) for name in names}
    recording, most = recordings.load_shipped(), service.hot.max_draft_tokens
    if pool:
        recorded_as = {member.drafter.name: member.recorded_as for member in pool}
        recording = recordings.rename_for_pool(recording, recorded_as, shares, seed=0)
    return Deployment(
        service=service,
        world=replace(world, drafters={member.drafter.name: _times(member, world, parts, most) for member in pool}),
        recording=recording,
        drafters=tuple(member.drafter for member in pool),
        acceptance={
            member.drafter.name: shares[member.drafter.name] for member in pool if member.recorded_as != LOOKUP
        },
        limits=replace(service.limits, kv_tokens=world.kv_tokens),
        notices=(*service.notices, *_differences(service, world), *(_skip_note(name, world) for name in unknown)),
    )


def _drafts(service: Service) -> dict[str, ModelShape]:
    """Return the shapes of the pool's draft models, by their names in a composed world."""
    models = [member for member in service.pool if member.recorded_as == DRAFT]
    return {_draft_name(number): find_shape(member.model) for number, member in enumerate(models)}


def _times(member: Member, world: World, parts: Mapping[str, str], most: int) -> DrafterTimes:
    """Return a drafter's times. most: longest draft, apart from the drafter's own limit."""
    times, limit = world.drafters[parts[member.drafter.name]], member.drafter.most_tokens
    if member.drafter.is_block and isinstance(
        times, Passes
    ):  # composed as an EAGLE head; a profile has the block drafter itself
        return BlockPass(times, 1 + (most if limit is None else min(most, limit)))
    return times


def _draft_name(number: int) -> str:
    return DRAFT if number == 0 else f"{DRAFT}-{number + 1}"


def _parts(service: Service, world: World) -> dict[str, str]:
    """Return the names of the pool's drafters in the world: the pool's in a measured world, else the methods'."""
    if world.origin == "measured":
        return {member.drafter.name: member.drafter.name for member in service.pool}
    models = [member for member in service.pool if member.recorded_as == DRAFT]

    def part(member: Member) -> str:
        return _draft_name(models.index(member)) if member in models else member.recorded_as

    return {member.drafter.name: part(member) for member in service.pool}


def _check(acceptance: Mapping[str, float | None], names: list[str]) -> None:
    for name in acceptance:
        if name not in names:
            raise SimulationError(
                f"--acceptance: {name!r} is no simulated drafter with a model; there are {_list_names(names)}"
            )


def _differences(service: Service, world: World) -> list[str]:
    notices = []
    if world.origin != "composed" and world.model.rpartition("/")[2].lower() not in service.target.lower():
        notices.append(f"the manifest's target is {service.target}; the step times are those of {world.model}.")
    if world.gpus != service.gpus:
        notices.append(f"the manifest splits the target over {service.gpus}; the step times are those of {world.gpus}.")
    return notices


def _skip_note(name: str, world: World) -> str:
    return f"drafter {name!r} is left out: {world.name} has step times for {_list_names(world.drafters)} only."


def _list_names(names: Mapping[str, object] | list[str]) -> str:
    return ", ".join(names) or "none"
