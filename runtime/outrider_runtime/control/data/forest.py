"""What drafters proposed, as arrays over nodes: a chain is a tree of width 1. Shapes: M nodes, N requests, R ranks."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import NO_DRAFTER, Bools, Floats, Ints
from outrider_runtime.control.data.plans import DraftPlan, Purpose

ROOT = -1
"""Parent of a node that follows the request's last committed token."""


class Nodes(NamedTuple):
    """The columns of a `Forest`, as compiled code takes them, and as an engine hands over trees that it holds."""

    request: Ints
    parent: Ints
    drafter: Ints
    depth: Ints
    rank: Ints
    confidence: Floats


_nodes = attrgetter(*Nodes._fields)


@dataclass(slots=True, eq=False)
class Forest:
    """Every real proposal of a step: no padding, and no token that a grammar rules out. A parent stands before its
    children. Treat it as immutable, like `Batch`."""

    request: Ints
    """(M,): row in `Batch`."""
    parent: Ints
    """(M,): number of the node that it follows; ROOT if it follows the last committed token."""
    drafter: Ints
    """(M,): number in the pool."""
    depth: Ints
    """(M,): 1 below ROOT."""
    rank: Ints
    """(M,): 0 for the most probable child of its parent among those proposed, 1 for the next one."""
    confidence: Floats
    """(M,): what the drafter says of the token, given its parent: log-odds for a model, tokens of the match for a
    lookup. NaN: not known, or not known yet (asynchronous scheduling plans by depth alone)."""
    drafter_order: Ints
    """(R, N): drafters that were scheduled for each request, in order of preference; NO_DRAFTER ends the order."""
    lengths: Ints
    """(D,): scheduled draft length of each drafter; 0: it did not run."""
    purpose: Purpose
    """Purpose of the draft plan that these proposals come from."""
    placeholders: Bools | None = None
    """(N,): the request's nodes are placeholders, since the engine has not yet reported what was proposed. None: every
    node is a real proposal."""

    def __len__(self) -> int:
        return len(self.request)

    @property
    def columns(self) -> tuple[Any, ...]:
        """Fields of `Nodes`, in a plain tuple: compiled calls unpack it faster than a named one."""
        return _nodes(self)


def trials(forest: Forest, verified: Bools, accepted: Bools) -> Bools:
    """(M,): `Outcome.tried` for an engine that knows nothing about nodes that were not verified."""
    return np.asarray(verified & ((forest.parent == ROOT) | accepted[forest.parent]))


def nothing_proposed(requests: int, drafters: int, purpose: Purpose = Purpose.CHOICE) -> Forest:
    """The forest of a step for which no drafter was scheduled."""
    none = np.zeros(0, dtype=np.int64)
    drafter_order = np.full((1, requests), NO_DRAFTER, dtype=np.int64)
    return Forest(none, none, none, none, none, np.zeros(0), drafter_order, np.zeros(drafters, np.int64), purpose)


def chains(
    lengths: Ints, drafter: Ints, plan: DraftPlan, drafter_order: Ints, confidence: NDArray[np.floating] | None = None
) -> Forest:
    """A forest of chains: `lengths` (N,) nodes for each request, proposed by its `drafter` (N,).

    plan: the plan that these proposals come from. drafter_order: `plan.drafter_order` (R, N'), its columns rearranged
    to this step's N requests. confidence: (M,), request after request; None: not known.
    """
    request, parent, of, depth, rank = _chains(lengths, drafter)
    known = np.full(len(request), np.nan) if confidence is None else confidence
    return Forest(request, parent, of, depth, rank, known, drafter_order, plan.passes, plan.purpose)


@compiled
def _chains(lengths: Ints, drafter: Ints) -> Ints:
    """(5, M): request, parent, drafter, depth and rank of each node."""
    nodes = np.zeros((5, lengths.sum()), np.int64)
    m = 0
    for i in range(len(lengths)):
        for depth in range(1, lengths[i] + 1):
            nodes[0, m], nodes[1, m], nodes[2, m], nodes[3, m] = i, ROOT if depth == 1 else m - 1, drafter[i], depth
            m += 1
    return nodes
