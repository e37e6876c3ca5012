"""Worlds from the rows of MagicDec's Table 1: Llama on 8 x A100, long contexts, sparse self-speculation.

    python -m outrider_runtime.simulate.worlds.magicdec FOLDER     both worlds, anew

The paper gives a whole step of one token and one of three. Their difference is what tokens cost; the rest of the step
of one token counts as attention, by requests and context. Between 1 and 32 requests there are no rows.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.simulate.data import data_text
from outrider_runtime.simulate.worlds.compose import LOOKUP, write
from outrider_runtime.simulate.worlds.tables import Curve, ModelTables, curve, surface

VERIFIED = 3
"""Tokens of a request in a step that verifies, throughout Table 1."""
DRAFT_PASSES = 2
DRAFTERS = {"self": "sparse", "tinyllama-1.1b": "draft"}
GPUS, BUDGET_TOKENS = 8, 512
A100_BYTES, KV_BYTES = 80 << 30, {"llama-2-7b": 524288, "llama-3.1-8b": 131072}
WEIGHT_BYTES = 16 << 30
PREFILL_TFLOPS, PARAMETERS = 0.5 * 312 * GPUS, 8e9
CHUNKS = (1, 8192)
NOTHING = curve((1,), (0,))
DERIVED = (
    "Steps of 1 to 31 requests: there are no rows; those of 32.",
    "What a token costs: the difference of the rows with 3 and with 1, averaged over contexts.",
    "Prompts: half of the GPUs' peak throughput.",
    "Prompt lookup: 0.05 ms and 4 us a request.",
    "Contexts without a row at a batch: read along the nearest contexts that have one.",
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


def rows(target: str) -> list[Row]:
    lines = (line for line in data_text("magicdec_table1.csv").splitlines() if not line.startswith("#"))
    return [
        Row(
            line["target"], line["draft"], int(line["prefill"]), int(line["batch"]),
            *(float(line[name]) for name in ("draft_ms", "verify_ms", "decode_ms")),
        )
        for line in csv.DictReader(lines)
        if line["target"] == target
    ]  # fmt: skip


def tables(found: Sequence[Row]) -> ModelTables:
    tokens = _token_curve(found)
    batches = sorted({row.requests for row in found})
    contexts = sorted({row.context for row in found})
    attention = [[_decode_ms(found, batch, context) - tokens(batch) for context in contexts] for batch in batches]
    prompt_ms = [[2 * PARAMETERS * chunk / (PREFILL_TFLOPS * 1e12) * 1e3] for chunk in CHUNKS]
    return ModelTables(tokens, NOTHING, surface(batches, contexts, attention), surface(CHUNKS, (0,), prompt_ms))


def _token_curve(found: Sequence[Row]) -> Curve:
    """Rising from nothing at the smallest batch: each batch says what 2 more tokens a request cost."""
    batches = sorted({row.requests for row in found})
    slopes = [
        float(np.mean([row.verify_ms - row.decode_ms for row in found if row.requests == batch]))
        / ((VERIFIED - 1) * batch)
        for batch in batches
    ]
    at = [batches[0], *(VERIFIED * batch for batch in batches)]
    ms = [0.0]
    for (left, right), slope in zip(pairwise(at), slopes, strict=True):
        ms.append(ms[-1] + slope * (right - left))
    return curve(at, ms)


def _decode_ms(found: Sequence[Row], batch: int, context: int) -> float:
    known = sorted({(row.context, row.decode_ms) for row in found if row.requests == batch})
    at, ms = np.array([point[0] for point in known], float), np.array([point[1] for point in known])
    if len(at) > 1 and context > at[-1]:
        return float(ms[-1] + (ms[-1] - ms[-2]) / (at[-1] - at[-2]) * (context - at[-1]))
    return float(np.interp(context, at, ms))


def _draft_tables(found: Sequence[Row], draft: str) -> ModelTables:
    """One pass, by requests: its context is the same few tokens whatever the request's."""
    batches = sorted({row.requests for row in found if row.draft == draft})
    ms = [
        float(np.mean([row.draft_ms for row in found if (row.draft, row.requests) == (draft, batch)])) / DRAFT_PASSES
        for batch in batches
    ]
    flat = surface((1,), (1,), ((0,),))
    return ModelTables(curve(batches, ms), NOTHING, flat, flat)


def document(name: str, target: str, model: str) -> dict[str, Any]:
    found = rows(target)
    no_launch = {"launchMs": 0.0, "samplingMs": [0.0, 0.0]}
    drafts = {
        DRAFTERS[draft]: {"kind": "model", **_draft_tables(found, draft).document(), **no_launch}
        for draft in dict.fromkeys(row.draft for row in found)
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
        "target": {**tables(found).document(), **no_launch},
        "drafters": {**drafts, "lookup": LOOKUP},
    }


def main() -> None:
    folder = Path(sys.argv[1])
    print(write(document("llama-3.1-8b-8xa100-long", "llama-3.1-8b", "meta-llama/Llama-3.1-8B"), folder))


if __name__ == "__main__":
    main()
