"""Refuses a LoRA adapter that cannot give its own answers (worker process).

vLLM copies an adapter's weights into the corner of larger tensors, and leaves out modules that the model does not have
and embeddings. So an adapter for another model would be served without an error, and often as the bare target. Weights
that are not finite are worse: the KV that they make spoils later requests, whatever these ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from vllm.lora.utils import get_adapter_absolute_path, is_base_embedding_weights
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear

from outrider_runtime.finite_weights import not_finite
from outrider_runtime.vllm_plugin.patches import ADAPTER_LOADER, put

WEIGHTS_ENDINGS = ("safetensors", "bin", "pt")
"""Endings of an adapter's file `adapter_model`, in the order in which vLLM looks for them."""


class ModuleSize(NamedTuple):
    inputs: int
    outputs: int


def check_each(manager: Any) -> None:
    """Make vLLM's worker-side manager of adapters check each one that it loads."""
    load: Callable[[Any], Any] = manager._load_adapter
    target = manager._adapter_manager

    def checked(request: Any) -> Any:
        adapter = load(request)
        folder = Path(get_adapter_absolute_path(request.lora_path))
        problem = next(defects(adapter), "") or next(trained_embeddings(folder, target.model), "")
        if problem:
            raise ValueError(problem)
        misfit = next(misfits(adapter, target), "")
        if misfit:
            raise ValueError(f"it does not fit the target: {misfit}")
        return adapter

    put(ADAPTER_LOADER, checked, of=manager)


def defects(adapter: Any) -> Iterator[str]:
    """Yield a sentence for each module whose weights are wrong for any target. adapter: vLLM's LoRAModel."""
    for name, weights in sorted(adapter.loras.items()):
        if ".experts" in name:  # fused in one of several layouts, which vLLM compares itself
            yield from _broken(name, "weights", *_tensors(weights.lora_a), *_tensors(weights.lora_b))
            continue
        lacking = [part for part, tensor in (("A", weights.lora_a), ("B", weights.lora_b)) if tensor is None]
        if lacking:
            yield f"its {name} has no lora_{lacking[0]}: save it again, whole"
            continue
        ranks = {weights.lora_a.shape[0], weights.lora_b.shape[1]}
        if ranks != {weights.rank}:
            has = " and ".join(map(str, sorted(ranks)))
            yield f"its {name} has weights of rank {has}, and adapter_config.json says {weights.rank}"
        yield from _broken(name, "lora_A", weights.lora_a)
        yield from _broken(name, "lora_B", weights.lora_b * weights.scaling)


def _broken(name: str, what: str, *tensors: torch.Tensor) -> Iterator[str]:
    numbers = next(filter(None, map(not_finite, tensors)), "")
    if numbers:
        yield f"its {name} has {what} with {numbers}: train or save it again"


def _tensors(weights: Any) -> list[torch.Tensor]:
    parts = weights if isinstance(weights, list) else [weights]
    return [part for part in parts if part is not None]


def trained_embeddings(folder: Path, model: Any) -> Iterator[str]:
    """Yield a sentence for each embedding of the adapter that is not the target's own: vLLM does not load it."""
    for name, saved in _saved_embeddings(folder):
        layer = _embedding_of(model, name.split(".")[-3])
        if layer is None or not _is_same(saved, layer):
            yield f"its {name} was trained, and the engine serves no embeddings of adapters: train it without"


def _saved_embeddings(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the embeddings in the file that vLLM read, by name."""
    file = next(file for ending in WEIGHTS_ENDINGS if (file := folder / f"adapter_model.{ending}").is_file())
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as weights:
            for name in filter(is_base_embedding_weights, weights.keys()):
                yield name, weights.get_tensor(name)
        return
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    yield from ((name, tensors[name]) for name in filter(is_base_embedding_weights, tensors))


def _embedding_of(model: Any, ending: str) -> Any:
    """Return the target's layer whose name ends like that, without vLLM's wrapper for adapters."""
    layers = [layer for name, layer in model.named_modules() if name.rpartition(".")[2] == ending]
    return getattr(layers[0], "base_layer", layers[0]) if layers else None


def _is_same(saved: torch.Tensor, layer: Any) -> bool:
    """Return whether an embedding is the target's, in the rows that this rank has."""
    rows = layer.shard_indices
    own = layer.weight[: rows.num_org_elements]
    saved = saved[rows.org_vocab_start_index : rows.org_vocab_end_index]
    return own.shape == saved.shape and bool((own.cpu() == saved.to(own.dtype)).all())


def misfits(adapter: Any, target: Any) -> Iterator[str]:
    """Yield a sentence for each module of vLLM's LoRAModel that differs from the target's. target: vLLM's manager."""
    if not adapter.loras:
        yield "it changes no module that the target has"
    sizes, names = module_sizes(target), module_names(target)
    for name, weights in sorted(adapter.loras.items()):
        if ".experts" in name:  # fused in one of several layouts, which vLLM compares itself
            continue
        if name not in names:
            limited = target.lora_config.target_modules is not None
            chosen = "the target does not have, or --lora-target-modules in engine.extraArgs leaves out"
            yield f"it changes {name}, which {chosen if limited else 'the target does not have'}"
            continue
        size, own = sizes.get(name), ModuleSize(weights.lora_a.shape[1], weights.lora_b.shape[0])
        if size is not None and size != own:
            yield (
                f"its {name} takes {own.inputs} numbers and makes {own.outputs}, the target's {size.inputs} and "
                f"{size.outputs}"
            )


def module_names(target: Any) -> set[str]:
    """Names of the target's modules that adapters may change, as checkpoints name them."""
    packed = target.packed_modules
    return {part for name in target.modules for part in packed.get(name, [name])}


def module_sizes(target: Any) -> dict[str, ModuleSize]:
    """Sizes of the target's linear layers over all devices, by name of the layer in checkpoints."""
    sizes: dict[str, ModuleSize] = {}
    for name, module in target.modules.items():
        layer = getattr(module, "base_layer", None)
        if isinstance(layer, LinearBase):
            parts = target.packed_modules.get(name, [name])
            outputs = _outputs(layer) if len(parts) > 1 else [layer.output_size]
            if len(outputs) == len(parts):
                sizes |= {part: ModuleSize(layer.input_size, made) for part, made in zip(parts, outputs, strict=True)}
    return sizes


def _outputs(layer: LinearBase) -> list[int]:
    """Outputs of each of the checkpoint's layers that vLLM keeps in one."""
    if isinstance(layer, QKVParallelLinear):
        keys, values = layer.total_num_kv_heads * layer.head_size, layer.total_num_kv_heads * layer.v_head_size
        return [layer.total_num_heads * layer.head_size, keys, values]
    return list(getattr(layer, "output_sizes", ()))
