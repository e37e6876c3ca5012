"""Starts the drafters of a service's pool that this engine can host, and says why it leaves the others out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from outrider_crds.draft_pool import DrafterSpec, DraftMethod
from outrider_crds.model_sources import ModelRef
from outrider_crds.runtime_config import BootConfig, draft_mount
from outrider_crds.runtime_state import DrafterMemory

from outrider_runtime.bucket import is_bucket
from outrider_runtime.drafters.kept_answers import kept_answers
from outrider_runtime.drafters.pool import choose_pool
from outrider_runtime.drafters.suffix import match_lengths
from outrider_runtime.paths import Paths
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.drafting import TorchDrafter
from outrider_runtime.torch_engine.drafts.draft_model_drafter import DraftModelDrafter
from outrider_runtime.torch_engine.drafts.eagle_drafter import EagleDrafter
from outrider_runtime.torch_engine.drafts.medusa_drafter import MedusaDrafter
from outrider_runtime.torch_engine.drafts.suffix_drafter import SuffixDrafter
from outrider_runtime.torch_engine.kv_pool import KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel

logger = logging.getLogger(__name__)
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.gguf"]


class Hosted(NamedTuple):
    """The drafters that were started."""

    specs: list[DrafterSpec]
    drafters: list[TorchDrafter]
    """The drafters, in the order of `specs`."""
    left_out: Mapping[str, str]
    """Name of a drafter that was not started -> the reason."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target whose input the drafters read."""
        return tuple(sorted({layer for drafter in self.drafters for layer in drafter.layers}))

    def memory(self, target: CachedModel) -> dict[str, DrafterMemory]:
        """Memory of each drafter that has weights.

        concurrency_percent: requests that fit into the KV memory / requests that would fit without the drafter.
        """
        bytes_per_token = target.cache.bytes_per_token + sum(drafter.kv_bytes_per_token for drafter in self.drafters)
        return {
            spec.name: DrafterMemory(
                weight_bytes=drafter.weight_bytes, kv_bytes_per_token=drafter.kv_bytes_per_token,
                concurrency_percent=100 * (bytes_per_token - drafter.kv_bytes_per_token) / bytes_per_token,
            )
            for spec, drafter in zip(self.specs, self.drafters, strict=True) if drafter.weight_bytes
        }  # fmt: skip


def host(boot: BootConfig, paths: Paths, target: CachedModel, pool: KVPool) -> Hosted:
    """Start the drafters of the pool and register each in the KV pool. One that fails is left out with its reason."""
    pool_choice = choose_pool(boot, paths.models)
    specs = list[DrafterSpec]()
    drafters = list[TorchDrafter]()
    left_out = dict(pool_choice.dropped)
    for spec in pool_choice.hosted:
        try:
            drafter = _drafter(spec, paths, target, pool, len(specs) + 1)
        except UnsupportedModelError as error:
            left_out[spec.name] = str(error)
        except Exception as error:  # broken files may raise anything, and must not keep the service down
            left_out[spec.name] = f"it cannot be started: {type(error).__name__}: {error}"
        else:
            specs.append(spec)
            drafters.append(drafter)
            pool.add_model(drafter.kv_bytes_per_token)
    for name, reason in left_out.items():
        logger.warning("drafter %r is left out: %s", name, reason)
    return Hosted(specs, drafters, left_out)


def _drafter(spec: DrafterSpec, paths: Paths, target: CachedModel, pool: KVPool, number: int) -> TorchDrafter:
    """Load one drafter. number: the number it will have in the KV pool."""
    match = match_lengths(spec)
    if match is not None:
        return SuffixDrafter(match, kept_answers(spec))
    assert spec.neural is not None
    folder = model_folder(spec.neural.model, paths, draft_mount(spec.name))
    if spec.method is DraftMethod.EAGLE:
        return EagleDrafter(folder, number, target, pool)
    if spec.method is DraftMethod.MEDUSA:
        return MedusaDrafter(folder, target)
    return DraftModelDrafter(CachedModel(folder, number, dtype=target.dtype, device=target.device), pool)


def model_folder(model: ModelRef, paths: Paths, mount: str) -> Path:
    """Find a model's folder; download it when it is on the Hugging Face Hub. Raises UnsupportedModelError."""
    location = paths.models.location(model, mount)
    if is_bucket(location):
        raise UnsupportedModelError(f"model {location!r} is in a bucket, which engine.backend vLLM alone can read")
    if Path(location).is_absolute():
        return Path(location)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(location, revision=model.revision, allow_patterns=MODEL_FILES))
    except Exception as error:  # the hub client's errors share no base class
        raise UnsupportedModelError(f"model {location!r} cannot be downloaded from the hub: {error}") from None
