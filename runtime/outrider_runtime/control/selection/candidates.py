"""Candidates of the search for the best drafters: plans that differ from the incumbent in one drafter.

A drafter that proposes trees has one variant for each width of its trees, of which at most one runs; a chain is a tree
of width 1. Shapes: D drafters, V variants, C candidates, K positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import Bools, Ints


class Variants(NamedTuple):
    drafter: Ints
    """(V,)"""
    width: Ints
    """(V,)"""
    models: Bools
    """(V,): variants of models: they have a proposal for any context, and so serve requests that a lookup misses."""
    passes: Bools
    """(V,): autoregressive variants: every token is a pass."""


class Candidates(NamedTuple):
    rows: Ints
    """(C, V): draft lengths. The first row is the incumbent."""
    uniform: Bools
    """(C,): plans of uniform steps: every request verifies the whole chain of one model, and all chains have one
    length. Such steps may be cheaper (`Price.uniform_s`), so a request may verify tokens that do not pay for themselves
    but keep the step uniform."""


def variants(autoregressive: Bools, stands_in: Bools, widest: Ints) -> Variants:
    """autoregressive (`passes`), stands_in, widest: (D,), see `settings.Drafter`."""
    drafter = np.repeat(np.arange(len(widest)), widest)
    width = np.array([w + 1 for most in widest for w in range(most)], np.int64)
    return Variants(drafter, width, stands_in[drafter], autoregressive[drafter])


@compiled
def one_drafter_moves(
    incumbent: Ints, is_uniform: bool, variants: Variants, longest: int, positions: int, weigh_uniform: bool
) -> Candidates:
    """The incumbent (V,), and every plan that gives one variant another draft length, 0 included.

    An autoregressive model proposes up to `longest` tokens. A lookup and a block drafter propose all that they have, up
    to `positions`, at one price; a uniform step verifies any part of a block.

    Several models together may pay where none does alone, since verified tokens are paid for once, whichever model each
    request uses. So while nothing runs, "all models at one length" is a move, too. weigh_uniform: add uniform plans,
    where a move changes the length of all variants at once, since any other move would leave the plan uneven.
    """
    most, models = 2 + 2 * (len(incumbent) + 1) * (longest + 1), variants.models
    rows, uniform, count = np.zeros((most, len(incumbent)), np.int64), np.zeros(most, np.bool_), 1
    rows[0], uniform[0] = incumbent, is_uniform
    if is_uniform:
        rows[1], count = incumbent, 2
    for v in range(len(incumbent)):
        for length in range(longest + 1) if variants.passes[v] else range(0, positions + 1, positions):
            if length != incumbent[v]:
                rows[count] = np.where(variants.drafter == variants.drafter[v], 0, incumbent)
                rows[count, v] = length
                count += 1
        for length in range(1, longest + 1 if weigh_uniform and _stays_uniform(incumbent, variants, v) else 1):
            rows[count] = np.where(incumbent > 0, length, 0)
            rows[count, v], uniform[count] = length, True
            count += 1
    together = models & (variants.width == 1)
    for length in range(1, longest + 1 if together.sum() > 1 and not incumbent.any() else 1):
        for kind in range(2 if weigh_uniform else 1):
            rows[count], uniform[count] = np.where(together, length, 0), kind == 1
            count += 1
    return Candidates(rows[:count], uniform[:count])


@compiled
def _stays_uniform(draft_lengths: Ints, variants: Variants, added: int) -> bool:
    """Whether only chains of models run, variant `added` included."""
    for v in range(len(draft_lengths)):
        if (draft_lengths[v] > 0 or v == added) and (variants.width[v] > 1 or not variants.models[v]):
            return False
    return True
