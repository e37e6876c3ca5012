"""Composes a world from NVIDIA's measured kernels (the package aiconfigurator-core, the extra `bench`).

    python -m outrider_runtime.simulate.worlds.compose FOLDER     every world of the benchmarks

The package has the times of matrix products, attention and all-reduces on a system, and adds them up for a step of
plain decoding or of prefill. The time of a step that verifies is composed from the products of all its tokens and the
attention of its requests. `DERIVED` names the parts that are not measured.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.worlds.shapes import (
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_160M,
    VICUNA_7B,
    VICUNA_33B,
    ModelShape,
    eagle_head,
)
from outrider_runtime.simulate.worlds.tables import Curve, ModelTables, curve, curve_document, surface

PACKAGE = "aiconfigurator-core"
BACKEND = "vllm"
TOKENS = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 2049, 64), 2560, 3072, 4096, 6144, 8192)
LOGITS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2304)
REQUESTS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
CONTEXT = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHUNK = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PREFIX = (0, 512, 1024, 2048, 4096, 8192, 16384)
"""Sizes of the tables: dense where kernels and captured graphs jump, sparse beyond."""
FURTHER_QUERY = 0.045
"""Attention of a further query token of a request / attention of the first one.

It follows from MagicDec's Table 1 (8 x A100, Llama-3.1-8B, 8,000 to 32,000 tokens of context): with 3 tokens a request,
a step's time grows 1.05 to 1.15 times as fast with context as with one.
"""
GRAPH_TOKENS = 512
"""vLLM's largest captured graph."""
PIECE_LAUNCH_MS = 0.006
"""Launch time of a layer whose attention runs between CUDA graphs."""
FLASH_ATTENTION_3 = ("h100_sxm", "h200_sxm")
"""Systems with full CUDA graphs for steps of any lengths."""
DRAFT_LAUNCH = {"launchMs": 0.08, "samplingMs": [0.02, 3e-4]}
LOOKUP = {"kind": "lookup", "constantMs": 0.05, "perRequestMs": 0.004}
SPARSE = {"kind": "sparse"}
MEMORY_SHARE, OTHER_BYTES = 0.9, 4 << 30
DERIVED = (
    "launchMs, samplingMs: not measured; 0.15 ms a step that one graph runs, 6 us a layer more where a prompt is in it "
    "(attention runs between graphs), 0.08 ms a pass of a draft; sampling 0.02 ms and 0.3 us a token with logits.",
    "Attention of 2 to 9 query tokens: that of one and 4.5% for each further one, from the rows of MagicDec's Table 1.",
    "Attention of requests of unequal context: that of their mean.",
    "An EAGLE-3 head: one layer of the target's width; the wider input counted as a second projection of queries and "
    "keys, the fusion of three states as three output projections in the first pass.",
    "The 1B draft: its heads of 64 taken as half as many of 128, which every system was measured with.",
    "Sparse self-speculation: a pass is a step of the target over the window, run by a graph.",
    "Prompt lookup: 0.05 ms and 4 us a request.",
    "kvTokens: 0.9 of the memory, less weights and 4 GiB a GPU.",
)
VARLEN = (
    "varlenLaunchMs: not measured; FlashAttention 2 has whole graphs for steps of equal lengths only. A step of "
    "unequal lengths runs in pieces, with attention between graphs, as a step with a prompt does: its promptLaunchMs."
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The input of a composition."""

    name: str
    system: str
    gpus: int
    target: ModelShape
    model: str
    """Name of the target."""
    drafts: Mapping[str, ModelShape]
    """Draft models with a cache of their own, by drafter name."""

    def covers(self, other: Recipe) -> bool:
        """Return whether its world has all step times of the other recipe."""
        same = (self.system, self.gpus, self.target) == (other.system, other.gpus, other.target)
        return same and other.drafts.items() <= self.drafts.items()


RECIPES = (
    *(
        Recipe(f"llama-3.1-8b-{name}", system, 1, LLAMA_8B, "meta-llama/Llama-3.1-8B-Instruct", {"draft": LLAMA_1B})
        for name, system in (("h200", "h200_sxm"), ("h100", "h100_sxm"), ("a100", "a100_sxm"), ("l40s", "l40s"))
    ),
    *(
        Recipe(
            f"llama-3.1-70b-4x{gpu}", f"{gpu}_sxm", 4, LLAMA_70B, "meta-llama/Llama-3.1-70B-Instruct",
            {"draft": LLAMA_1B},
        )
        for gpu in ("h100", "a100")
    ),
    Recipe("vicuna-7b-l40s", "l40s", 1, VICUNA_7B, "lmsys/vicuna-7b-v1.5", {"draft": LLAMA_160M}),
    Recipe("vicuna-33b-2xh100", "h100_sxm", 2, VICUNA_33B, "lmsys/vicuna-33b-v1.3", {"draft": LLAMA_160M}),
)  # fmt: skip


class Kernels:
    """Kernel times of one model on one system, from the package."""

    def __init__(self, shape: ModelShape, system: str, gpus: int) -> None:
        """Raises SimulationError if the package is missing, or does not know the system."""
        try:
            from aiconfigurator_core import AicEngine
            from aiconfigurator_core.sdk import compile_engine
        except ImportError as error:
            raise missing_package(system) from error
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shape.config()))
            try:
                self._engine = AicEngine.from_spec(compile_engine(folder, system, BACKEND, tp_size=gpus))
            except Exception as error:  # the package raises many kinds
                raise SimulationError(f"{PACKAGE} cannot compose {gpus} x {system}: {error}") from error

    def decode(self, requests: int, context: int) -> dict[str, float]:
        """Return milliseconds of each operation in a step of plain decoding."""
        return {name: ms for name, ms, *_ in self._engine.decode_step_per_op(requests, context, 2)}

    def prefill_attention(self, chunk: int, prefix: int) -> float:
        parts, _ = self._engine.run_static_per_op(1, 1, chunk + prefix, 1, prefix, 1.0, 1.0, "static_ctx")
        return float(sum(ms for name, ms, *_ in parts if "attention" in name))


def missing_package(name: str) -> SimulationError:
    """Make the error for a missing package. name: the system or model that does not ship."""
    shipped = ", ".join(f"{recipe.model} on {recipe.gpus} x {recipe.system}" for recipe in RECIPES)
    return SimulationError(
        f"no step times ship for {name}: they do for {shipped}. The package {PACKAGE} composes those of other systems "
        "and dense models (pip install '.[bench]' in a checkout)"
    )


def tables(kernels: Kernels, *, wide_input: bool = False) -> ModelTables:
    """Make the tables of a model. wide_input: whether queries and keys read twice the width, as in an EAGLE head."""
    steps = [kernels.decode(tokens, 1024) for tokens in TOKENS]
    decode = [[_part_ms(kernels.decode(n, context), "attention") for context in CONTEXT] for n in REQUESTS]
    prefill = [[kernels.prefill_attention(chunk, prefix) for prefix in PREFIX] for chunk in CHUNK]
    return ModelTables(
        curve(TOKENS, [_each_token_ms(step, wide_input) for step in steps]),
        curve(LOGITS, [_part_ms(kernels.decode(n, 1024), "logits") for n in LOGITS]),
        surface(REQUESTS, CONTEXT, decode),
        surface(CHUNK, PREFIX, prefill),
    )


def _each_token_ms(step: Mapping[str, float], wide_input: bool) -> float:
    parts = sum(ms for name, ms in step.items() if "attention" not in name and "logits" not in name)
    return parts + (_part_ms(step, "qkv") if wide_input else 0.0)


def _part_ms(step: Mapping[str, float], part: str) -> float:
    return sum(ms for name, ms in step.items() if part in name)


def fusion(kernels: Kernels) -> Curve:
    """Return the extra time of an EAGLE-3 head's first pass, which fuses three hidden states of the target into one."""
    return curve(TOKENS, [3 * _part_ms(kernels.decode(n, 1024), "proj") for n in TOKENS])


def compose(recipe: Recipe) -> dict[str, Any]:
    """Make a world's document. Raises SimulationError, see `Kernels`."""
    kv_tokens = _kv_tokens(recipe)
    target = tables(Kernels(recipe.target, recipe.system, recipe.gpus)).document()
    pieces_ms = round(PIECE_LAUNCH_MS * recipe.target.layers, 3)
    varlen = {} if recipe.system in FLASH_ATTENTION_3 else {"varlenLaunchMs": pieces_ms}
    return {
        "name": recipe.name,
        "origin": "composed",
        "model": recipe.model,
        "device": recipe.system,
        "gpus": recipe.gpus,
        "source": f"{PACKAGE} {_version()}, system {recipe.system}, backend {BACKEND}, tensor parallel {recipe.gpus}",
        "derived": [*DERIVED, *([VARLEN] if varlen else [])],
        "kvTokens": kv_tokens,
        "graphTokens": GRAPH_TOKENS,
        "target": {
            **target,
            "launchMs": 0.15,
            "promptLaunchMs": pieces_ms,
            **varlen,
            "samplingMs": [0.02, 3e-4],
            "furtherQuery": FURTHER_QUERY,
        },
        "drafters": {"eagle": _head(recipe), **_drafts(recipe), "sparse": SPARSE, "lookup": LOOKUP},
    }


def _head(recipe: Recipe) -> dict[str, Any]:
    kernels = Kernels(eagle_head(recipe.target), recipe.system, recipe.gpus)
    parts = tables(kernels, wide_input=True).document()
    return {"kind": "head", **parts, **DRAFT_LAUNCH, "fusion": curve_document(fusion(kernels))}


def _drafts(recipe: Recipe) -> dict[str, Any]:
    return {
        name: {"kind": "model", **tables(Kernels(shape, recipe.system, recipe.gpus)).document(), **DRAFT_LAUNCH}
        for name, shape in recipe.drafts.items()
    }


def _version() -> str:
    from importlib.metadata import version

    return version(PACKAGE)


def _kv_tokens(recipe: Recipe) -> int:
    memory = _memory_bytes(recipe.system)
    drafts = [eagle_head(recipe.target), *recipe.drafts.values()]
    free = recipe.gpus * (MEMORY_SHARE * memory - OTHER_BYTES)
    free -= recipe.target.weight_bytes + sum(draft.weight_bytes for draft in drafts)
    kv_bytes = recipe.target.kv_bytes + sum(draft.kv_bytes for draft in drafts)
    if free < kv_bytes:
        raise SimulationError(f"{recipe.model} does not fit into {recipe.gpus} x {recipe.system}")
    return int(free / kv_bytes)


def _memory_bytes(system: str) -> int:
    """Return the memory of one GPU. Raises SimulationError, which lists the known systems, for an unknown one."""
    try:
        import aiconfigurator_core
    except ImportError as error:
        raise missing_package(system) from error

    folder = Path(aiconfigurator_core.__file__).parent / "systems"
    described = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in folder.glob("*.yaml")}
    gpus = {name: described_system["gpu"] for name, described_system in described.items() if "gpu" in described_system}
    if system not in gpus:
        raise SimulationError(f"{PACKAGE} has no system {system}; it has {', '.join(sorted(gpus))}")
    return int(gpus[system]["mem_capacity"])


def write(document: Mapping[str, Any], folder: Path) -> Path:
    """Write a world, with one line for each part, so that changes are readable."""
    path = folder / f"{document['name']}.json"
    path.write_text(_lines(document, 0) + "\n", encoding="utf-8")
    return path


def _lines(value: Any, depth: int) -> str:
    if not isinstance(value, Mapping) or depth == 3:
        return json.dumps(value)
    inner = ",\n".join(f'{" " * (depth + 1)}"{name}": {_lines(part, depth + 1)}' for name, part in value.items())
    return "{\n" + inner + "\n" + " " * depth + "}"


def main() -> None:
    folder = Path(sys.argv[1])
    for recipe in RECIPES:
        print(write(compose(recipe), folder), flush=True)


if __name__ == "__main__":
    main()
