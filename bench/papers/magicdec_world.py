"""A world from the rows of MagicDec's Table 1: Llama on 8 x A100, long contexts, sparse self-speculation.

    python -m bench.papers.magicdec_world FOLDER     compose the world

The paper gives the time of a step of one token, of one of three tokens, and of two passes of the draft, by requests and
context. The world has the same parts. The paper has no rows between 1 and 32 requests.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from outrider_runtime.simulate.worlds.compose import LOOKUP, write
from outrider_runtime.simulate.worlds.tables import ModelTables, curve, surface

TABLE = Path(__file__).parent / "magicdec_table1.csv"
DRAFTED = 2
"""Drafted tokens per request and step, each by a pass, throughout Table 1."""
DRAFTERS = {"self": "sparse", "tinyllama-1.1b": "draft"}
GPUS, BUDGET_TOKENS = 8, 512
A100_BYTES, KV_BYTES = 80 << 30, {"llama-2-7b": 524288, "llama-3.1-8b": 131072}
WEIGHT_BYTES = 16 << 30
PREFILL_TFLOPS, PARAMETERS = 0.5 * 312 * GPUS, 8e9
CHUNKS = (1, 8192)
NOTHING = curve((1,), (0,))
DERIVED = (
    "Steps of 1 to 31 requests: there are no rows; those of 32.",
    "What a verified token costs: half the difference of a row's steps of 3 and of 1 tokens, at its context.",
    "Contexts of less than 4,000 tokens, where the rows begin: as 4,000.",
    "Contexts between a batch's rows: straight lines; beyond them: the last row's, and a step's time goes on rising.",
    "Prompts: half of the GPUs' peak throughput.",
    "Prompt lookup: 0.05 ms and 4 us a request.",
    "kvTokens: 0.9 of the memory, less weights.",
)


class Row(NamedTuple):
    target: str
    draft: str
    context: int
    requests: int
    draft_ms: float
    verify_ms: float
    decode_ms: float
    omega: float
    """Tokens a step of a request."""
    speedup: float
    """Printed speed-up. It is below `omega * decode_ms / (draft_ms + verify_ms)`: steps took longer than that sum."""


def rows(target: str) -> list[Row]:
    lines = (line for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return [
        Row(
            line["target"], line["draft"], int(line["prefill"]), int(line["batch"]),
            *(float(line[name]) for name in ("draft_ms", "verify_ms", "decode_ms", "omega", "speedup")),
        )
        for line in csv.DictReader(lines)
        if line["target"] == target
    ]  # fmt: skip


def tables(table_rows: Sequence[Row]) -> ModelTables:
    """Make the target's tables. None is by tokens alone: a verified token's cost is known by requests and context."""
    batches, contexts = _places(table_rows)
    attention = [[_decode_ms(table_rows, batch, context) for context in contexts] for batch in batches]
    further = [
        [
            _interpolate(table_rows, batch, context, lambda row: row.verify_ms - row.decode_ms) / (DRAFTED * batch)
            for context in contexts
        ]
        for batch in batches
    ]
    prompt_ms = [[2 * PARAMETERS * chunk / (PREFILL_TFLOPS * 1e12) * 1e3] for chunk in CHUNKS]
    return ModelTables(
        NOTHING, NOTHING, surface(batches, contexts, attention), surface(CHUNKS, (0,), prompt_ms),
        surface(batches, contexts, further),
    )  # fmt: skip


def _places(table_rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    return sorted({row.requests for row in table_rows}), sorted({row.context for row in table_rows})


def _interpolate(table_rows: Sequence[Row], batch: int, context: int, of: Callable[[Row], float]) -> float:
    """Interpolate a value between the contexts of a batch's rows; beyond them, take the nearest row's."""
    known = sorted((float(row.context), of(row)) for row in table_rows if row.requests == batch)
    return float(np.interp(context, [at for at, _ in known], [value for _, value in known]))


def _decode_ms(table_rows: Sequence[Row], batch: int, context: int) -> float:
    known = sorted({(row.context, row.decode_ms) for row in table_rows if row.requests == batch})
    at, ms = np.array([point[0] for point in known], float), np.array([point[1] for point in known])
    if len(at) > 1 and context > at[-1]:
        return float(ms[-1] + (ms[-1] - ms[-2]) / (at[-1] - at[-2]) * (context - at[-1]))
    return float(np.interp(context, at, ms))


def _draft_tables(table_rows: Sequence[Row], draft: str) -> ModelTables:
    """Make the tables of one draft pass, by requests and whole context: it reads the same KV at each context, but the
    measured time grows with it."""
    of_draft = [row for row in table_rows if row.draft == draft]
    batches, contexts = _places(of_draft)
    ms = [
        [_interpolate(of_draft, batch, context, lambda row: row.draft_ms) / DRAFTED for context in contexts]
        for batch in batches
    ]
    return ModelTables(NOTHING, NOTHING, surface(batches, contexts, ms), surface((1,), (1,), ((0,),)))


def document(name: str, target: str, model: str) -> dict[str, Any]:
    table_rows = rows(target)
    no_launch = {"launchMs": 0.0, "samplingMs": [0.0, 0.0]}
    drafts = {
        DRAFTERS[draft]: {
            "kind": "model",
            "byWholeContext": True,
            **_draft_tables(table_rows, draft).document(),
            **no_launch,
        }
        for draft in dict.fromkeys(row.draft for row in table_rows)
    }
    return {
        "name": name,
        "origin": "rows",
        "model": model,
        "device": "a100_sxm",
        "gpus": GPUS,
        "source": f"MagicDec (arXiv 2408.11049), Table 1: 8 x A100, draft budget {BUDGET_TOKENS} tokens",
        "derived": list(DERIVED),
        "kvTokens": int((0.9 * GPUS * A100_BYTES - WEIGHT_BYTES) / KV_BYTES[target]),
        "graphTokens": None,
        "target": {**tables(table_rows).document(), **no_launch},
        "drafters": {**drafts, "lookup": LOOKUP},
    }


def main() -> None:
    folder = Path(sys.argv[1])
    print(write(document("llama-3.1-8b-8xa100-long", "llama-3.1-8b", "meta-llama/Llama-3.1-8B"), folder))


if __name__ == "__main__":
    main()
