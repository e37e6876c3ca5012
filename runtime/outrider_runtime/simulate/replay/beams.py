"""Narrower and shallower beams, cut from a recorded one. Shapes: N requests, K depths, W ranks at a depth, M nodes."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.batch import Bools, Floats, Ints
from outrider_runtime.control.plans import ROOT
from outrider_runtime.simulate.recording import LOG_ODDS, Trees


class Table(NamedTuple):
    """Proposals of N requests by depth and rank; all (N, K, W)."""

    there: Bools
    parent: Ints
    """Rank of the parent at the depth before; 0 for the first depth."""
    confidence: Floats
    right: Bools
    """Whether the target accepts the node, after all nodes before it."""

    @property
    def nodes(self) -> tuple[Ints, Ints, Ints, Ints, Floats]:
        """Request, parent, depth, rank and confidence of each node, (M,) each, as `Forest` has them."""
        request, depth, place = np.nonzero(self.there)
        number = np.full(self.there.shape, ROOT)
        number[self.there] = np.arange(len(request))
        above = np.where(depth > 0, number[request, depth - 1, self.parent[request, depth, place]], ROOT)
        return request, above, depth + 1, ranks(request, above), self.confidence[self.there]


def ranks(request: Ints, parent: Ints) -> Ints:
    """(M,): number of siblings before each node."""
    key = request * (len(parent) + 1) + parent + 1
    order = np.argsort(key, kind="stable")
    of_key = key[order]
    first = np.concatenate(([True], of_key[1:] != of_key[:-1]))[: len(key)]
    begins = np.maximum.accumulate(np.where(first, np.arange(len(key)), 0))
    siblings_before = np.empty(len(key), np.int64)
    siblings_before[order] = np.arange(len(key)) - begins
    return siblings_before


class RecordedBeams:
    """Recorded beams of one drafter, at P positions of the recording."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self.widest = trees.parent.shape[2]

    @cached_property
    def kept(self) -> NDArray[np.bool_]:
        """(W+1, P, K, W): nodes of a beam of each width.

        A depth has the likeliest recorded nodes whose parents are in the beam, and the greedy chain. A narrow beam may
        have fewer nodes than a real one, since the recorded wide beam kept other nodes.
        """
        parent = self._trees.parent.astype(np.int64)
        in_beam = np.zeros((self.widest + 1, *parent.shape), bool)
        for width in range(1, self.widest + 1):
            in_beam[width, :, 0, :width] = True
            chain = np.zeros(len(parent), np.int64)
            for depth in range(1, parent.shape[1]):
                has_parent = np.take_along_axis(in_beam[width, :, depth - 1], parent[:, depth], 1)
                chain = (parent[:, depth] == chain[:, None]).argmax(1)
                is_chain = np.arange(self.widest) == chain[:, None]
                ahead = np.where(
                    is_chain, 0, np.where(chain[:, None] < width, has_parent.cumsum(1), 1 + has_parent.cumsum(1))
                )
                in_beam[width, :, depth] = has_parent & (ahead <= width)
        return in_beam

    def table(self, at: Ints, lengths: Ints, width: int) -> Table:
        """Return the beams of a width at N positions `at`, cut to `lengths` (N,)."""
        trees, depths = self._trees, self._trees.parent.shape[1]
        there = self.kept[width, at] & (np.arange(depths) < lengths[:, None])[:, :, None]
        right = trees.on_path[at][:, :, None] == np.arange(self.widest)
        return Table(there, trees.parent[at].astype(np.int64), trees.confidence[at] * (LOG_ODDS / 127), right)
