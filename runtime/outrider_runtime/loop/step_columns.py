"""Columns of a `Batch`, from what the engine says of its requests and the request table knows of them.

Compiled, since a numpy operation costs as much as a hundred requests. Shapes: N requests, S slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.control.batch import Floats, Ints
from outrider_runtime.control.compiled import compiled

SLO_CLASS, LEFT, PROMPT, PROMPT_LEFT, CERTAIN = range(5)
"""Rows of the columns: fields of `Batch`, and `ScheduledStep.certain`."""


class SlotColumns(NamedTuple):
    """Columns by slot that do not change while a request runs, apart from the time of its first token. All (S,)."""

    prompt: Ints
    """Tokens of the prompt."""
    limit: Ints
    """Prompt and output tokens at which the request ends."""
    slo_class: Ints
    first_at: Floats
    """Monotonic seconds of the first token; infinite before it."""


@compiled
def _columns(slots: Ints, known: Ints, table: SlotColumns, now_s: float) -> tuple[Ints, Floats]:
    """(5, N): SLO class, and tokens that the request may still produce; (N,): seconds since its first token.

    known: (N,), tokens so far, prompts included."""
    columns, elapsed_s = np.zeros((5, len(slots)), np.int64), np.zeros(len(slots))
    for i in range(len(slots)):
        slot = slots[i]
        columns[SLO_CLASS, i] = table.slo_class[slot]
        columns[LEFT, i] = max(0, table.limit[slot] - known[i])
        elapsed_s[i] = max(0.0, now_s - table.first_at[slot])
    return columns, elapsed_s


@compiled
def columns_ahead(
    slots: Ints, known: Ints, todo: Ints, table: tuple[Any, ...], now_s: float, token_budget: int
) -> tuple[Ints, Floats]:  # fmt: skip
    """Columns before a step is scheduled, assuming that each prompt gets the whole budget. todo: (N,), see `View`; 1
    stands for the last sampled token of a decoding request. table: fields of `SlotColumns`."""
    columns, elapsed_s = _columns(slots, known, SlotColumns(*table), now_s)
    for i in range(len(slots)):
        if todo[i] > 1:
            columns[PROMPT, i] = min(todo[i], token_budget)
            columns[PROMPT_LEFT, i] = todo[i] - columns[PROMPT, i]
    return columns, elapsed_s


@compiled
def columns_scheduled(
    slots: Ints, view: tuple[Ints, Ints, Ints], tokens: Ints, proposed: Ints,
    table: tuple[Any, ...], now_s: float,
) -> tuple[Ints, Floats]:  # fmt: skip
    """Columns of a scheduled step. view: context, known and todo of a `View`. tokens, proposed: (N,), tokens that the
    step computes, and proposals among them. table: fields of `SlotColumns`."""
    (context, known, todo), of_slot = view, SlotColumns(*table)
    columns, elapsed_s = _columns(slots, known, of_slot, now_s)
    for i in range(len(slots)):
        own = tokens[i] - proposed[i]
        left = max(0, todo[i] - own)
        decodes = own == 1 and left == 0 and context[i] + todo[i] > of_slot.prompt[slots[i]]
        columns[PROMPT, i], columns[PROMPT_LEFT, i] = 0 if decodes else own, left
        columns[CERTAIN, i] = min(context[i], known[i])
    return columns, elapsed_s
