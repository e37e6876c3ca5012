"""Compare a composed world with an independent measurement of the same GPU.

    python -m bench.check_world FOLDER

FOLDER holds Llama-3.1-8B on an RTX PRO 6000, measured layer by layer inside vLLM by LLMServingSim's authors:
dense.csv, per_sequence.csv, attention.csv. Launch gaps are in neither.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from outrider_runtime.simulate.worlds.compose import Kernels
from outrider_runtime.simulate.worlds.shapes import LLAMA_8B

SYSTEM = "rtx_pro_6000_server"
EACH_LAYER = ("layernorm", "layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512)


def read_measurements(folder: Path) -> tuple[dict[int, float], dict[int, float], dict[tuple[int, int], float]]:
    """Read milliseconds of all layers: of matrix products by tokens, of the output layer by tokens, and of attention by
    requests and context."""
    dense = _table(folder / "dense.csv", "layer", "tokens")
    sequence = _table(folder / "per_sequence.csv", "layer", "sequences")
    layers = LLAMA_8B.layers
    tokens = {n: (layers * sum(dense[layer, n] for layer in EACH_LAYER) + dense["embedding", n]) / 1e3 for n in TOKENS}
    logits = {n: sequence["lm_head", n] / 1e3 for n in BATCHES}
    with (folder / "attention.csv").open() as file:
        attention = {
            (int(row["n_decode"]), int(row["kv_decode"])): layers * float(row["time_us"]) / 1e3
            for row in csv.DictReader(file)
            if row["prefill_chunk"] == "0"
        }
    return tokens, logits, attention


def _table(path: Path, name: str, axis: str) -> dict[tuple[str, int], float]:
    with path.open() as file:
        return {(row[name], int(row[axis])): float(row["time_us"]) for row in csv.DictReader(file)}


def errors(folder: Path) -> dict[str, list[float]]:
    """Return composed / measured - 1: of matrix products, of attention, and of whole steps of plain decoding."""
    kernels = Kernels(LLAMA_8B, SYSTEM, 1)
    tokens, logits, attention = read_measurements(folder)
    points = [(n, context) for n in BATCHES for context in CONTEXTS if (n, context) in attention]
    steps = {point: kernels.decode(*point) for point in points}
    return {
        "matrix products": [_parts(kernels.decode(n, 1024))[0] / tokens[n] - 1 for n in TOKENS],
        "attention": [_parts(step)[1] / attention[point] - 1 for point, step in steps.items()],
        "whole steps": [
            sum(step.values()) / (tokens[n] + logits[n] + attention[n, context]) - 1
            for (n, context), step in steps.items()
            if n in tokens
        ],
    }


def _parts(step: Mapping[str, float]) -> tuple[float, float]:
    attention = sum(ms for name, ms in step.items() if "attention" in name)
    return sum(ms for name, ms in step.items() if "logits" not in name) - attention, attention


def main() -> None:
    for name, world_errors in errors(Path(sys.argv[1])).items():
        shares = np.array(world_errors)
        print(
            f"{name}: median {np.median(shares):+.1%}, median absolute {np.median(abs(shares)):.1%}, "
            f"from {shares.min():+.1%} to {shares.max():+.1%} ({len(shares)} points)"
        )


if __name__ == "__main__":
    main()
