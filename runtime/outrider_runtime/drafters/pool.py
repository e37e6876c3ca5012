"""Chooses the drafters of the pool that an engine can host, before it starts.

A drafter never keeps a pod from starting: the pod's state names each drafter that is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from outrider_crds.base import Model
from outrider_crds.draft_pool import DrafterSpec, DraftMethod
from outrider_crds.model_sources import ModelRef
from outrider_crds.runtime_config import TARGET_MOUNT, BootConfig, draft_mount, model_location

from outrider_runtime.bucket import bucket_folder, is_bucket
from outrider_runtime.drafters import METHODS
from outrider_runtime.drafters.checkpoint_files import tensor_names
from outrider_runtime.drafters.draft_configs import ModelConfig, ModelPair, target_config, typed_config
from outrider_runtime.model_config import CONFIG_FILE, Config, read_config


class ModelPlaces(Model):
    """Paths of models: in a pod under the operator's mounts, on a laptop as in the manifest."""

    mounted: bool = True

    def location(self, model: ModelRef, mount: str) -> str:
        """Return the folder of a model, its bucket's URI, or its name on the hub."""
        host_path = model.source.host_path
        return host_path.path if host_path is not None and not self.mounted else model_location(model, mount)


class HostedPool(Model):
    hosted: tuple[DrafterSpec, ...] = ()
    """Drafters in the pool's order. A drafter's position is its number in messages between scheduler and worker."""
    dropped: dict[str, str] = {}
    """Why a drafter is not hosted, in a sentence, by drafter name."""

    @property
    def neural(self) -> tuple[DrafterSpec, ...]:
        return tuple(drafter for drafter in self.hosted if drafter.neural is not None)

    @property
    def primary(self) -> DrafterSpec | None:
        """The drafter that vLLM's own config names.

        Block drafters, then EAGLE heads come first, since the target must output hidden states for them. Drafters that
        write KV ahead of the target follow, since vLLM must keep room for it in the cache.
        """
        reading = (DraftMethod.BLOCK, DraftMethod.EAGLE, DraftMethod.MTP)
        heads = [drafter for method in reading for drafter in self.hosted if drafter.method is method]
        selves = [drafter for drafter in self.hosted if drafter.sparse_self is not None]
        return next(iter((*heads, *self.neural, *selves, *self.hosted)), None)

    def without(self, name: str, reason: str) -> HostedPool:
        left = tuple(drafter for drafter in self.hosted if drafter.name != name)
        return HostedPool(hosted=left, dropped={**self.dropped, name: reason})


def choose_pool(boot: BootConfig, places: ModelPlaces) -> HostedPool:
    """Sort the pool into drafters that can be hosted and drafters that cannot."""
    pool = HostedPool()
    for drafter in boot.draft_pool:
        reason = _obstacle(boot, drafter, places)
        if reason:
            pool = pool.without(drafter.name, reason)
        else:
            pool = HostedPool(hosted=(*pool.hosted, drafter), dropped=pool.dropped)
    return pool


def _obstacle(boot: BootConfig, drafter: DrafterSpec, places: ModelPlaces) -> str:
    """Return why `drafter` cannot propose for the target, in a sentence; empty if no reason is known."""
    unsupported = METHODS[drafter.method].unsupported.get(boot.engine.backend, "")
    if unsupported or (drafter.neural is None and drafter.sparse_self is None and drafter.mtp is None):
        return unsupported
    neural = drafter.neural
    try:
        draft = _read(neural.model, draft_mount(drafter.name), places) if neural is not None else None
        target = _read(boot.target, TARGET_MOUNT, places, target_config)
        tensors = tensor_names(draft.location) if draft is not None else set()
    except (OSError, ValueError) as error:
        return str(error)
    longest = _longest_request(boot, target.config)
    too_long = window_too_long(drafter, longest)
    if too_long or drafter.sparse_self is not None:
        return too_long
    draft = draft or target  # the target's own checkpoint holds the drafter
    most = None if drafter.block is None else drafter.block.max_tokens
    models = ModelPair(draft.config, target.config, draft.location, target.location, longest, tensors, most)
    return METHODS[drafter.method].obstacle(models)


class _LoadedConfig(NamedTuple):
    config: ModelConfig
    location: str


def _read(
    model: ModelRef, mount: str, places: ModelPlaces, parse: Callable[[Config, str], ModelConfig] = typed_config
) -> _LoadedConfig:
    """Read a model's config. Raises OSError or ValueError with a sentence."""
    location = places.location(model, mount)
    config = parse(model_config(model, location), location)
    return _LoadedConfig(config, str(bucket_folder(location)) if is_bucket(location) else location)


def _longest_request(boot: BootConfig, target: ModelConfig) -> int | None:
    """Return the most tokens of a request; None if the user changes the target's config (`--hf-overrides`).

    The engine resolves such a change, and its worker checks the drafters against it.
    """
    changes = any(argument.replace("_", "-").startswith("--hf-o") for argument in boot.engine.extra_args)
    return boot.engine.max_model_len or (None if changes else target.max_position_embeddings)


def window_too_long(drafter: DrafterSpec, longest: int | None) -> str:
    """Refuse a window above the longest request, as admission does if engine.maxModelLen is set."""
    if longest is None or drafter.window is None or drafter.window <= longest:
        return ""
    return f"its window is {drafter.window} tokens, and a request may take {longest}: lower sinkTokens or windowTokens"


def model_config(model: ModelRef, location: str) -> Config:
    """Read a config.json from the model's folder, its bucket or the hub. Raises OSError or ValueError."""
    if is_bucket(location):
        return read_config(bucket_folder(location))
    if location.startswith("/") or Path(location).is_dir():
        return read_config(Path(location))
    from huggingface_hub import hf_hub_download  # part of the engine's own installation

    try:
        file = Path(hf_hub_download(location, CONFIG_FILE, revision=model.revision))
    except Exception as error:  # the hub's errors share no base class; any of them means "not there"
        raise OSError(f"model {location!r} cannot be downloaded from the hub: {error}") from error
    return read_config(file.parent)
