"""Device memory of the pool's members, measured after loading (worker process).

A member costs concurrency even if it never runs: its weights leave less room for KV, and each cached token needs KV of
its layers, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from outrider_crds.runtime_state import DrafterMemory
from torch import nn


def weight_bytes(model: nn.Module, target: nn.Module) -> int:
    """Count the bytes of this rank's part of `model`, without tensors that it shares with the target."""
    shared = {address for address, _ in _storages(target)}
    own = {address: size for address, size in _storages(model) if address not in shared}
    return sum(own.values()) + sum(_packed_bytes(module) for module in model.modules())


def _storages(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the address and size in bytes of each tensor's storage; tensors may share one."""
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            yield storage.data_ptr(), storage.nbytes()


def _packed_bytes(layer: Any) -> int:
    """Count the bytes of a linear layer whose weights a CPU kernel has repacked, which leaves the tensor empty."""
    if getattr(layer, "weight", None) is None or layer.weight.numel() or not hasattr(layer, "params_dtype"):
        return 0
    inputs = getattr(layer, "input_size_per_partition", layer.input_size)
    outputs = getattr(layer, "output_size_per_partition", layer.output_size)
    return int(inputs * outputs * layer.params_dtype.itemsize)


def kv_bytes_per_token(kv_cache_config: Any, layers: Collection[str] | None = None) -> int:
    """Count the bytes of KV per token in these attention layers; None: in all layers of target and members."""
    total = 0
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            if layers is None or name in layers:
                spec = specs.get(name, group.kv_cache_spec)
                total += spec.page_size_bytes // spec.block_size
    return total


def kv_tokens(kv_cache_config: Any) -> int:
    """Count the tokens that the KV cache has room for: each takes its part of a block in every group of layers.

    This is a lower bound if a group drops tokens that its window has passed.
    """
    blocks_per_token = sum(1 / group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
    return int(kv_cache_config.num_blocks / blocks_per_token) if blocks_per_token else 0


def drafter_memory(weights: int, own: int, total: int, tokens: int, *, shares_with_kv: bool) -> DrafterMemory:
    """Compute the memory of a member, and the concurrency that it costs.

    own, total: bytes of KV per token, in the member's layers and in all layers. tokens: capacity of the KV cache.
    shares_with_kv: whether weights leave less room for KV, as on GPUs; on CPUs the cache has a fixed size.
    """
    room = total * tokens + (weights if shares_with_kv else 0)
    without = max(tokens, room / max(1, total - own))
    share = 1 - tokens / without if without else 0.0
    return DrafterMemory(weight_bytes=weights, kv_bytes_per_token=own, concurrency_percent=round(100 * share, 2))


class MemoryUse(NamedTuple):
    """Memory of a drafter, before the KV cache has its size."""

    weight_bytes: int
    kv_bytes: int
    """KV of one request of the longest length."""


def left_out_to_fit(takes: Mapping[str, MemoryUse], lacking: int, *, shares_with_kv: bool) -> list[str]:
    """Choose drafters whose removal frees `lacking` bytes for KV, the largest first.

    The result is empty if removing all drafters is not enough: then the target itself does not fit.
    """
    freed = {name: use.kv_bytes + (use.weight_bytes if shares_with_kv else 0) for name, use in takes.items()}
    removed = []
    for name in sorted(freed, key=lambda name: freed[name], reverse=True):
        if lacking > 0:
            removed.append(name)
            lacking -= freed[name]
    return removed if lacking <= 0 else []


def does_not_fit(takes: Mapping[str, MemoryUse], free: int, needed: int, longest: int) -> str:
    """Describe a pool that does not fit. free: bytes left for KV. needed: bytes of a request of `longest` tokens."""
    drafters = "; ".join(
        f"{name} takes {_mib(use.weight_bytes)} of weights and {_mib(use.kv_bytes)} of such a request"
        for name, use in takes.items()
    )
    return (
        f"the pool does not fit into memory: {_mib(free)} are left for KV, a request of {longest} tokens takes "
        f"{_mib(needed)}; {drafters}. Lower engine.maxModelLen, or take a smaller draft"
    )


def heaviest(takes: Mapping[str, MemoryUse]) -> str | None:
    """Return the drafter with the largest weights; None if no drafter has weights of its own."""
    return max(takes, key=lambda name: takes[name].weight_bytes, default=None)


def no_room_for_graphs(name: str, takes: MemoryUse) -> str:
    return (
        f"memory ended while the target's graphs were captured; {name} takes {_mib(takes.weight_bytes)} of weights. "
        "Lower --gpu-memory-utilization in engine.extraArgs, or take a smaller draft"
    )


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"
