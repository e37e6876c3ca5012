"""A service on hardware: what its steps cost, and what its drafters propose."""

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
from outrider_runtime.simulate.worlds.named_models import shape_of
from outrider_runtime.simulate.worlds.shapes import ModelShape
from outrider_runtime.simulate.worlds.world import BlockPass, DrafterTimes, Passes, World

DEFAULT_ACCEPTANCE = 0.7
"""TurboSpec, section 3: typical for drafts of Llama models."""


@dataclass(frozen=True, slots=True, eq=False)
class Deployment:
    service: Service
    world: World
    """Its drafters under the pool's names."""
    recording: Recording
    """Its drafters too."""
    drafters: tuple[Drafter, ...]
    """Those of the pool whose step times are known."""
    acceptance: Mapping[str, float | None]
    """By drafter with a model: what its first proposals are lifted to; None: as recorded."""
    limits: Limits
    notices: tuple[str, ...]


def on_system(service: Service, system: str) -> World:
    """Step times of the service's models on a system that NVIDIA measured: from those that ship, else composed.

    Raises SimulationError for what cannot be composed.
    """
    recipe = Recipe(service.name, system, service.gpus, shape_of(service.target), service.target, _drafts(service))
    shipped = next((one for one in RECIPES if one.covers(recipe)), None)
    return worlds.load(shipped.name) if shipped else worlds.parsed(compose(recipe))


def as_profiled(name_or_file: str) -> World:
    """A world that ships, or what outrider-profile measured. Raises SimulationError for neither."""
    path = Path(name_or_file)
    return profiled.load(path) if path.is_file() else worlds.load(name_or_file)


def deployed(service: Service, world: World, acceptance: Mapping[str, float | None]) -> Deployment:
    """`acceptance` by drafter; who is not in it counts as lifted to DEFAULT_ACCEPTANCE.

    Raises SimulationError where the world knows none of the pool's drafters, or one in `acceptance` is not there.
    """
    parts = _parts(service, world)
    pool = [member for member in service.pool if parts[member.drafter.name] in world.drafters]
    unknown = [member.drafter.name for member in service.pool if member not in pool]
    if unknown and not pool:
        raise SimulationError(f"{world.name} has step times for {_listed(world.drafters)} only, none of the pool's")
    names = [member.drafter.name for member in pool]
    _check(acceptance, [member.drafter.name for member in pool if member.recorded_as != LOOKUP])
    shares = {name: acceptance.get(name, DEFAULT_ACCEPTANCE) for name in names}
    recording, most = recordings.shipped(), service.hot.max_draft_tokens
    if pool:
        recorded_as = {member.drafter.name: member.recorded_as for member in pool}
        recording = recordings.for_pool(recording, recorded_as, shares, seed=0)
    return Deployment(
        service=service,
        world=replace(world, drafters={member.drafter.name: _times(member, world, parts, most) for member in pool}),
        recording=recording,
        drafters=tuple(member.drafter for member in pool),
        acceptance={
            member.drafter.name: shares[member.drafter.name] for member in pool if member.recorded_as != LOOKUP
        },
        limits=replace(service.limits, kv_tokens=world.kv_tokens),
        notices=(*service.notices, *_differences(service, world), *(_left_out(name, world) for name in unknown)),
    )


def _drafts(service: Service) -> dict[str, ModelShape]:
    """Shapes of the pool's draft models, by the names that a composed world gives them."""
    models = [member for member in service.pool if member.recorded_as == DRAFT]
    return {_draft_name(number): shape_of(member.model) for number, member in enumerate(models)}


def _times(member: Member, world: World, parts: Mapping[str, str], most: int) -> DrafterTimes:
    """most: draft tokens, without the drafter's own limit."""
    times, limit = world.drafters[parts[member.drafter.name]], member.drafter.most_tokens
    if member.drafter.is_block and isinstance(times, Passes):  # of an EAGLE head; a profile has the block's own
        return BlockPass(times, 1 + (most if limit is None else min(most, limit)))
    return times


def _draft_name(number: int) -> str:
    return DRAFT if number == 0 else f"{DRAFT}-{number + 1}"


def _parts(service: Service, world: World) -> dict[str, str]:
    """The world's names of the pool's drafters: a measured one has the pool's own, another one the methods'."""
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
                f"--acceptance: {name!r} is no simulated drafter with a model; there are {_listed(names)}"
            )


def _differences(service: Service, world: World) -> list[str]:
    found = []
    if world.origin != "composed" and world.model.rpartition("/")[2].lower() not in service.target.lower():
        found.append(f"the manifest's target is {service.target}; the step times are those of {world.model}.")
    if world.gpus != service.gpus:
        found.append(f"the manifest splits the target over {service.gpus}; the step times are those of {world.gpus}.")
    return found


def _left_out(name: str, world: World) -> str:
    return f"drafter {name!r} is left out: {world.name} has step times for {_listed(world.drafters)} only."


def _listed(names: Mapping[str, object] | list[str]) -> str:
    return ", ".join(names) or "nobody"
