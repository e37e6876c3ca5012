"""Step times from the data sheet: what must be read at the memory's speed, and what must be computed.

    T = overhead + max(weights / bandwidth, tokens * FLOPs per token / compute) + KV of the contexts / bandwidth + ...

The maximum is the latency model's own form: a constant up to a knee, a slope above it (AdaServe's token budget).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from outrider_runtime.control.costs import StepCost
from outrider_runtime.simulate.data import data_text

BYTES = 2
"""Of a weight, an activation or a KV entry: 16 bits."""
BANDWIDTH_SHARE = 0.85
"""Of the data sheet's bandwidth: what the slope over the context in MagicDec's A100 grid comes to (0.82 and 0.87)."""
COMPUTE_SHARE = 0.5
"""Of the data sheet's dense throughput: assumed, as good kernels reach it on matrices of some hundred tokens."""
ACTIVATIONS = 16
"""Vectors of the hidden size that each layer reads and writes for a token; assumed."""
TARGET_OVERHEAD_S = 1e-3
"""Of a step: scheduling, launch, sampling; assumed."""
DRAFT_OVERHEAD_S = 2e-4
"""Of a draft's pass; assumed."""
HOP_S = 10e-6
"""Of an all-reduce, two a layer, for each further GPU: what the constants of the fits to the A100 grid (6.3 and 6.8 ms
on 8 GPUs) leave beyond weights and overhead."""
MEMORY_SHARE = 0.9
"""vLLM's default gpu-memory-utilization."""
RESERVED_GIB = 3.0
"""Of each GPU: activations, graphs, a draft; assumed."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory_gib: float
    bandwidth_tb_s: float
    tflops: float

    @property
    def bytes_per_s(self) -> float:
        return BANDWIDTH_SHARE * self.bandwidth_tb_s * 1e12

    @property
    def flops(self) -> float:
        return COMPUTE_SHARE * self.tflops * 1e12


@dataclass(frozen=True, slots=True)
class TransformerShape:
    parameters: float
    """Billions that a pass reads."""
    layers: int
    hidden: int
    kv_width: int
    vocabulary: int

    @property
    def weight_bytes(self) -> float:
        return BYTES * self.parameters * 1e9

    @property
    def kv_bytes(self) -> int:
        """Of one token: a key and a value in each layer."""
        return 2 * BYTES * self.layers * self.kv_width


def derived_cost(
    model: TransformerShape, device: Device, gpus: int, overhead_s: float, *, batch_expansion: bool = False
) -> StepCost:
    """One forward pass of `model`, split evenly over `gpus`.

    `batch_expansion`: each verified token is scored as a sequence of its own and reads its whole context again, as in
    vLLM's first engine, on which TurboSpec was built.
    """
    bandwidth, compute = gpus * device.bytes_per_s, gpus * device.flops
    weights_s = model.weight_bytes / bandwidth
    moved_s = (BYTES * ACTIVATIONS * model.layers * model.hidden + 4 * model.vocabulary) / bandwidth
    computed_s = 2 * model.parameters * 1e9 / compute
    context_s = model.kv_bytes / bandwidth
    attention_s = 1000 * 4 * model.layers * model.hidden / compute
    reduce_s = 2 * model.layers * (gpus - 1) * HOP_S
    return StepCost(
        per_context_token_s=0.0 if batch_expansion else context_s,
        per_batched_token_s=moved_s,
        per_batched_token_above_knee_s=max(0.0, computed_s - moved_s),
        knee_tokens=weights_s / computed_s,
        per_context_query_s=attention_s + (1000 * context_s if batch_expansion else 0.0),
        constant_s=overhead_s + reduce_s + weights_s,
    )


def kv_tokens(model: TransformerShape, device: Device, gpus: int) -> int:
    """Tokens that fit beside the weights, in thousands. Raises ValueError where the weights alone do not fit."""
    free = gpus * GIB * (MEMORY_SHARE * device.memory_gib - RESERVED_GIB) - model.weight_bytes
    tokens = int(free / model.kv_bytes / 1000) * 1000
    if tokens <= 0:
        raise ValueError(f"{model.weight_bytes / GIB:.0f} GiB of weights do not fit on {gpus} x {device.name}")
    return tokens


@cache
def devices() -> dict[str, Device]:
    return {key: Device(**fields) for key, fields in document("devices.yaml").items()}


@cache
def models() -> dict[str, TransformerShape]:
    return {key: TransformerShape(**fields) for key, fields in document("models.yaml").items()}


def document(name: str) -> dict[str, dict[str, Any]]:
    """A shipped YAML file of named entries."""
    entries: dict[str, dict[str, Any]] = yaml.safe_load(data_text(name))
    return entries
