"""The drafters of a service's pool that this engine hosts, and why the others are left out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from outrider_crds.runtime_config import BootConfig, draft_mount
from outrider_crds.spec import Drafter as DrafterSpec
from outrider_crds.spec import DraftMethod, ModelRef
from outrider_crds.state import DrafterMemory

from outrider_runtime.drafters.pool import choose_pool
from outrider_runtime.paths import Paths
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.drafting import TorchDrafter
from outrider_runtime.torch_engine.drafts.draft_model_drafter import DraftModelDrafter
from outrider_runtime.torch_engine.drafts.eagle_drafter import EagleDrafter
from outrider_runtime.torch_engine.drafts.medusa_drafter import MedusaDrafter
from outrider_runtime.torch_engine.drafts.prompt_lookup_drafter import PromptLookupDrafter
from outrider_runtime.torch_engine.kv_pool import KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel

logger = logging.getLogger(__name__)
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.gguf"]


class Hosted(NamedTuple):
    specs: list[DrafterSpec]
    drafters: list[TorchDrafter]
    """In the order of `specs`."""
    left_out: Mapping[str, str]
    """Drafter -> the reason."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the target, that they read."""
        return tuple(sorted({layer for one in self.drafters for layer in one.layers}))

    def memory(self, target: CachedModel) -> dict[str, DrafterMemory]:
        """Of those that have weights."""
        a_token = target.cache.bytes_per_token + sum(one.kv_bytes_per_token for one in self.drafters)
        return {
            spec.name: DrafterMemory(
                weight_bytes=one.weight_bytes, kv_bytes_per_token=one.kv_bytes_per_token,
                concurrency_percent=100 * (a_token - one.kv_bytes_per_token) / a_token,
            )
            for spec, one in zip(self.specs, self.drafters, strict=True) if one.weight_bytes
        }  # fmt: skip


def host(boot: BootConfig, paths: Paths, target: CachedModel, pool: KVPool) -> Hosted:
    """A drafter never keeps a service down. Each that is hosted is the next model of the KV pool."""
    chosen = choose_pool(boot, paths.models)
    specs, drafters, left_out = list[DrafterSpec](), list[TorchDrafter](), dict(chosen.dropped)
    for spec in chosen.hosted:
        try:
            drafter = _drafter(spec, paths, target, pool, len(specs) + 1)
        except UnsupportedModelError as error:
            left_out[spec.name] = str(error)
        except Exception as error:  # whatever its files make their readers stumble over
            left_out[spec.name] = f"it cannot be started: {type(error).__name__}: {error}"
        else:
            specs.append(spec)
            drafters.append(drafter)
            pool.add_model(drafter.kv_bytes_per_token)
    for name, reason in left_out.items():
        logger.warning("drafter %r is not used: %s", name, reason)
    return Hosted(specs, drafters, left_out)


def _drafter(spec: DrafterSpec, paths: Paths, target: CachedModel, pool: KVPool, number: int) -> TorchDrafter:
    """number: its place among the models of the KV pool."""
    if spec.prompt_lookup is not None:
        return PromptLookupDrafter(spec.prompt_lookup.min_tokens, spec.prompt_lookup.max_tokens)
    assert spec.neural is not None
    folder = model_folder(spec.neural.model, paths, draft_mount(spec.name))
    if spec.method is DraftMethod.EAGLE:
        return EagleDrafter(folder, number, target, pool)
    if spec.method is DraftMethod.MEDUSA:
        return MedusaDrafter(folder, target)
    return DraftModelDrafter(CachedModel(folder, number, dtype=target.dtype, device=target.device), pool)


def model_folder(model: ModelRef, paths: Paths, mount: str) -> Path:
    """Downloaded where it lies on the hub. Raises UnsupportedModelError."""
    location = paths.models.location(model, mount)
    if Path(location).is_absolute():
        return Path(location)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(location, revision=model.revision, allow_patterns=MODEL_FILES))
    except Exception as error:  # the hub's errors share no base class; any of them means "not there"
        raise UnsupportedModelError(f"model {location!r} cannot be had from the hub: {error}") from None
