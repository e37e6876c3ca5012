"""What is weighed in a choice of drafters: sets of them, with passes and widths.

A drafter that can beam is as many variants as its trees may be wide, of which one runs at most; a chain is a tree of
width 1. Shapes: D drafters, V variants, C candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import Bools, Ints

EXACT_VARIANTS, REFINEMENTS = 2, 2
"""So many variants with passes are given every combination of lengths; more are given the same length, and then refined
one by one, at most so many times."""


class Candidates(NamedTuple):
    rows: Ints
    """(C, V): the passes of each variant. The first is k = 0; then each set of drafters with each length and width, or
    each combination of them: a lookup is asked for all there is. At the end models' chains come again, even."""
    even: Bools
    """(C,): every request verifies all of a model's chain, and all are as long. Such steps may be cheaper
    (`Price.uniform_s`): then a request is given tokens that do not pay for themselves where they keep the others' step
    cheap."""
    drafter: Ints
    """(V,)"""
    width: Ints
    """(V,)"""
    models: Bools
    """(V,): they have a proposal for any context, and stand in behind a lookup."""
    passes: Bools
    """(V,): every token is a pass."""


def candidates(passes: Bools, stands_in: Bools, widest: Ints, longest: int, depths: int) -> Candidates:
    """passes, stands_in, widest: (D,), see `settings.Drafter`. longest: draft length of models. depths: of lookups and
    block drafters, which propose all at one price."""
    return _candidates(tuple(passes.tolist()), tuple(stands_in.tolist()), tuple(widest.tolist()), longest, depths)


@lru_cache(maxsize=64)
def _candidates(
    passes: tuple[bool, ...], stands_in: tuple[bool, ...], widest: tuple[int, ...], longest: int, depths: int
) -> Candidates:  # fmt: skip
    drafter = [d for d, most in enumerate(widest) for _ in range(most)]
    width = [w + 1 for most in widest for w in range(most)]
    models, steps = [stands_in[d] for d in drafter], [passes[d] for d in drafter]
    every = range(1, longest + 1)
    # Of a large pool only rows of one length are made: all combinations would not fit into memory.
    lengths = [every] if sum(steps) <= EXACT_VARIANTS else [range(one, one + 1) for one in every] or [every]
    rows = [*dict.fromkeys(row for together in lengths for row in _rows(passes, widest, together, depths))]

    def order(row: tuple[int, ...]) -> tuple[int, int, list[bool], int]:
        """One set after the other, the smallest first; of equal ones the narrowest and the fewest passes win."""
        runs = [passes > 0 for passes in row]
        return sum(runs), sum(itertools.compress(width, runs)), runs, sum(row)

    rows.sort(key=order)
    # Elsewhere a block drafter proposes all it has; a uniform step verifies any part of that.
    uniform = (row for length in every for row in _rows(stands_in, widest, range(length, length + 1), depths))
    chains = sorted({row for row in uniform if _are_chains(row, models, width)}, key=order)
    even = np.arange(len(rows) + len(chains)) >= len(rows)
    of_variants = np.array(drafter, np.int64), np.array(width, np.int64), np.array(models, bool), np.array(steps, bool)
    return Candidates(np.array(rows + chains, np.int64), even, *of_variants)


def _rows(
    passes: tuple[bool, ...], widest: tuple[int, ...], longest: range, depths: int
) -> Iterator[tuple[int, ...]]:  # fmt: skip
    """Every combination of drafters, widths, and of the lengths of those with `passes`."""
    lengths = [longest if steps else (depths,) for steps in passes]
    options = [_options(*one) for one in zip(widest, lengths, strict=True)]
    return (tuple(itertools.chain(*row)) for row in itertools.product(*options))


def _options(widest: int, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """The passes of one drafter's variants: of one at most."""
    return [(0,) * widest] + [
        tuple(length * (w == runs) for w in range(widest)) for runs in range(widest) for length in lengths
    ]


def _are_chains(row: tuple[int, ...], models: Sequence[bool], width: Sequence[int]) -> bool:
    """Of models, and of one length."""
    return {(passes, models[v], width[v]) for v, passes in enumerate(row) if passes} == {(max(row), True, 1)}


@compiled
def beside(best: Ints, variants: Candidates, longest: int) -> Ints:
    """(C, V): `best`, and the candidates that differ from it in the passes of one drafter, whether it runs or not."""
    drafter = variants.drafter
    rows, count = np.empty((1 + len(best) * (1 + longest), len(best)), np.int64), 1
    rows[:] = best
    for v in np.flatnonzero(variants.models):
        for length in range(0, longest + 1, 1 if variants.passes[v] else max(1, longest)):
            if length == best[v]:
                continue
            for u in range(len(best)):
                rows[count, u] *= drafter[u] != drafter[v]
            rows[count, v] = length
            count += 1
    return rows[:count]
