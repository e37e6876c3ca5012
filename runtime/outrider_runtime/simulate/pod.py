"""What a manifest and a profile make of a pod: its drafters, their true costs, and the engine's limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider_crds.profile import normalised_arguments
from outrider_crds.runtime_config import HotConfig, hot_config
from outrider_crds.service import SpeculativeService
from outrider_crds.spec import Drafter, DraftMethod, Engine, ProfilingMode

from outrider_runtime.control.costs import DrafterCost, LatencyModel
from outrider_runtime.control.settings import DrafterSpec
from outrider_runtime.drafters import drafter_spec
from outrider_runtime.local_manifest import LocalManifestError, read_service
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.profile_document import DrafterProfile, SimulationProfile, control_cost
from outrider_runtime.simulate.scheduling import Limits

DEFAULT_TOKEN_BUDGET = 8192
"""vLLM's max_num_batched_tokens on large GPUs."""
DEFAULT_MAX_REQUESTS = 256
UNLIMITED_KV_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True)
class Pod:
    service: str
    profile: SimulationProfile
    drafters: tuple[Drafter, ...]
    """Those that the engine hosts, in the pool's order."""
    latency: LatencyModel
    """The truth; the controller is given it too, as its profile, unless `learns`."""
    limits: Limits
    hot: HotConfig
    max_draft_tokens: int
    learns: bool
    """profiling.mode is Skip: the controller starts without a profile."""
    notices: tuple[str, ...]
    """What the figures do not cover, in sentences."""

    @property
    def specs(self) -> tuple[DrafterSpec, ...]:
        return tuple(drafter_spec(drafter) for drafter in self.drafters)

    @property
    def neural(self) -> Drafter | None:
        return next((drafter for drafter in self.drafters if drafter.neural is not None), None)


def read_pod(manifest: Path, profile: SimulationProfile) -> Pod:
    """Raises SimulationError for a manifest that is none, or that the profile cannot stand for at all."""
    try:
        service = read_service(manifest)
    except LocalManifestError as error:
        raise SimulationError(str(error)) from error
    spec = service.spec
    hosted, notices = _hosted(spec.draft_pool, profile)
    if spec.draft_pool and not hosted:
        raise SimulationError(f"profile {profile.name} has costs for none of the pool's drafters: {' '.join(notices)}")
    drafter_costs = {
        drafter.name: DrafterCost(control_cost(found.cost), found.autoregressive, control_cost(found.first_pass))
        for drafter, found in hosted
    }
    return Pod(
        service=service.metadata.name,
        profile=profile,
        drafters=tuple(drafter for drafter, _ in hosted),
        latency=LatencyModel(profile.target_costs(), drafter_costs),
        limits=_limits(spec.engine, profile),
        hot=hot_config(spec),
        max_draft_tokens=spec.speculation.max_draft_tokens,
        learns=spec.profiling.mode is ProfilingMode.SKIP,
        notices=(*_differences(service, profile), *notices),
    )


def _hosted(
    pool: Sequence[Drafter], profile: SimulationProfile
) -> tuple[list[tuple[Drafter, DrafterProfile]], list[str]]:
    """Those that the profile has costs of, with them, and a sentence on each that it has none of its own of."""
    hosted, notices = [], []
    for drafter in pool:
        cost = _cost_of(drafter, profile)
        if cost is not None:
            hosted.append((drafter, cost))
            if cost.method is not drafter.method and not cost.name:
                notices.append(
                    f"drafter {drafter.name!r} is taken to cost what the profile says of {cost.method.value}."
                )
            continue
        has = ", ".join(sorted({one.name or one.method.value for one in profile.drafters})) or "none"
        notices.append(
            f"drafter {drafter.name!r} is left out: the profile has no costs of {drafter.method.value}, only of {has}."
        )
    return hosted, notices


def _cost_of(drafter: Drafter, profile: SimulationProfile) -> DrafterProfile | None:
    """Of the drafter of this name, else of this method; prompt lookup stands for others without a model."""
    named = [one for one in profile.drafters if one.name == drafter.name]
    alike = [one for one in profile.drafters if not one.name and one.method is drafter.method]
    lookups = [one for one in profile.drafters if not one.name and one.method is DraftMethod.PROMPT_LOOKUP]
    return next(iter([*named, *alike, *(lookups if drafter.neural is None else [])]), None)


def _differences(service: SpeculativeService, profile: SimulationProfile) -> Iterator[str]:
    spec = service.spec
    name = spec.target.name
    if profile.target.lower() not in name.lower():
        yield f"the manifest's target is {name!r}; the profile's step times are those of {profile.target!r}."
    if spec.engine.tensor_parallel_size != profile.gpus:
        yield (
            f"the manifest splits the target over {spec.engine.tensor_parallel_size} GPU(s); the profile's step times "
            f"are those of {profile.gpus}."
        )
    if spec.replicas > 1:
        yield f"one pod is simulated, and the load is one pod's; the service has {spec.replicas} replicas."


def _limits(engine: Engine, profile: SimulationProfile) -> Limits:
    arguments = dict(argument.split("=", 1) for argument in normalised_arguments(engine.extra_args) if "=" in argument)
    return Limits(
        token_budget=_number(arguments, "--max-num-batched-tokens", DEFAULT_TOKEN_BUDGET),
        max_requests=_number(arguments, "--max-num-seqs", DEFAULT_MAX_REQUESTS),
        kv_tokens=profile.kv_tokens or UNLIMITED_KV_TOKENS,
        max_model_len=engine.max_model_len or UNLIMITED_KV_TOKENS,
    )


def _number(arguments: dict[str, str], flag: str, default: int) -> int:
    text = arguments.get(flag, str(default))
    if not text.isdigit() or int(text) < 1:
        raise SimulationError(f"spec.engine.extraArgs: {flag}={text} is not a whole number of 1 or more")
    return int(text)
