"""Refuses a LoRA adapter that was trained for another model (worker process).

vLLM copies an adapter's weights into the corner of larger tensors, and leaves out modules that the model does not have.
So an adapter for a smaller model, or one with more layers, would be served without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear


class ModuleSize(NamedTuple):
    inputs: int
    outputs: int


def check_each(manager: Any) -> None:
    """Make vLLM's worker-side manager of adapters check each one that it loads."""
    load: Callable[[Any], Any] = manager._load_adapter
    target = manager._adapter_manager

    def checked(request: Any) -> Any:
        adapter = load(request)
        problem = next(misfits(adapter, target), "")
        if problem:
            raise ValueError(f"it does not fit the target: {problem}")
        return adapter

    manager._load_adapter = checked


def misfits(adapter: Any, target: Any) -> Iterator[str]:
    """Yield a sentence for each module of vLLM's LoRAModel that differs from the target's. target: vLLM's manager."""
    if not adapter.loras:
        yield "it changes no module that the target has"
    sizes, names = module_sizes(target), module_names(target)
    for name, weights in sorted(adapter.loras.items()):
        if ".experts" in name:  # fused in one of several layouts, which vLLM compares itself
            continue
        if name not in names:
            if target.lora_config.target_modules is None:
                yield f"it changes {name}, which the target does not have"
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
