"""MagicDec's step times: the A100 grid that profiles are fitted to, and the rows of other GPUs that are held out."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from outrider_runtime.control.costs import Shape
from outrider_runtime.control.fit import Fit, Form, Sample, fit
from outrider_runtime.simulate.data import data_text

GAMMA = 2
"""Proposed tokens throughout Table 1."""
HELD_OUT_EVERY = 4
BUDGET_TOKENS = 512
"""Context that the draft keeps (StreamingLLM), in Table 1."""
GPUS = 8


@dataclass(frozen=True, slots=True)
class GridRow:
    """A row of Table 1; times in seconds."""

    target: str
    draft: str
    prefill: int
    batch: int
    draft_s: float
    """GAMMA passes of the draft."""
    verify_s: float
    """One pass of the target over GAMMA + 1 tokens of each request."""
    decode_s: float
    """One pass over a token of each."""


@cache
def grid() -> tuple[GridRow, ...]:
    return tuple(
        GridRow(
            row["target"], row["draft"], int(row["prefill"]), int(row["batch"]),
            *(float(row[column]) / 1e3 for column in ("draft_ms", "verify_ms", "decode_ms")),
        )
        for row in table("magicdec_table1.csv")
    )  # fmt: skip


def fit_target(target: str) -> Fit:
    """The target's cost from three quarters of its points in Table 1; the error is on the rest."""
    samples = list(target_samples(target))
    held_out = samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return fit([sample for sample in samples if sample not in held_out], held_out)


def fit_draft(target: str, draft: str) -> Fit:
    """One pass of the draft. Its context is the same few tokens whatever the request's, so only the batch counts."""
    rows = [row for row in grid() if (row.target, row.draft) == (target, draft)]
    samples = [Sample(_draft_shape(row.batch), row.draft_s / GAMMA) for row in rows]
    held_out = samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return fit([sample for sample in samples if sample not in held_out], held_out, forms=(Form.BASE,))


def target_samples(target: str) -> Iterable[Sample]:
    """Each point once: a target's own step times stand in the table of each of its drafts."""
    seen: set[Shape] = set()
    for row in grid():
        if row.target != target:
            continue
        for query, seconds in ((1, row.decode_s), (GAMMA + 1, row.verify_s)):
            shape = decode_shape(row.batch, row.prefill, query)
            if shape not in seen:
                seen.add(shape)
                yield Sample(shape, seconds)


def decode_shape(batch: int, context: int, query: int) -> Shape:
    """A step in which `batch` requests of equal context carry `query` tokens each."""
    tokens = batch * context
    return Shape(tokens, batch * query, batch, tokens * query / 1000)


def _draft_shape(batch: int) -> Shape:
    return Shape(0, batch, batch)


def table(name: str) -> Iterable[dict[str, str]]:
    """Rows of a shipped CSV, its comment lines left out."""
    return csv.DictReader(line for line in data_text(name).splitlines() if not line.startswith("#"))
