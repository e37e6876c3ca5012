"""A request's proposals: a tree of tokens. A chain is a tree of width 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider_runtime.control.batch import Bools, Ints
from outrider_runtime.control.plans import ROOT, Nodes

NO_NODE = -2
"""Number of a node that does not exist; ROOT is -1."""


@dataclass(slots=True, eq=False)
class Tree:
    """Columns over nodes, parents before their children; a node's number is its index."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """ROOT for a node that follows the request's last known token."""
    drafters: list[int] = field(default_factory=list)
    """Number of the drafter that proposed each node first."""
    confidences: list[float] = field(default_factory=list)
    """The drafter's confidence in each node, as `control.plans.Forest` defines it."""
    depths: list[int] = field(default_factory=list)
    """1 for children of ROOT."""
    ranks: list[int] = field(default_factory=list)
    """0 for the first child of its parent."""
    drawn_from: Sequence[object] = ()
    """The distribution of each token, for a chain whose tokens were drawn; empty for any other tree."""
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _siblings: Counter[int] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, drafter: int, confidence: float) -> int:
        """Return the parent's child with this token, and add it if it is new."""
        number = self._children.setdefault((parent, token), len(self))
        if number == len(self):
            self.tokens.append(token)
            self.parents.append(parent)
            self.drafters.append(drafter)
            self.confidences.append(confidence)
            self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
            self.ranks.append(self._siblings[parent])
            self._siblings[parent] += 1
        return number

    def child(self, parent: int, token: int) -> int:
        """Return the parent's child with this token, or NO_NODE."""
        return self._children.get((parent, token), NO_NODE)

    def path(self, node: int) -> list[int]:
        """List the tokens from ROOT's child to the node; none for ROOT."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def only(self, numbers: Iterable[int]) -> Tree:
        """Build the tree of these nodes: ascending numbers, each with its parent."""
        part = _union([self], numbers)
        part.drawn_from = self.drawn_from[: len(part)]
        return part

    def within(self, depth: int) -> Tree:
        """Cut the tree below this depth."""
        if max(self.depths, default=0) <= depth:
            return self
        return self.only(number for number, node_depth in enumerate(self.depths) if node_depth <= depth)


def chain(tokens: Sequence[int], drafter: int, confidence: float | Sequence[float]) -> Tree:
    """Build a tree of width 1. confidence: one for each token, or for all."""
    tree, node = Tree(), ROOT
    for token, own in zip(tokens, np.broadcast_to(confidence, len(tokens)).tolist(), strict=True):
        node = tree.add(token, node, drafter, own)
    return tree


def merge(trees: Sequence[Tree]) -> Tree:
    """Merge trees: a path that several propose occurs once (SpecInfer, section 3)."""
    non_empty = [tree for tree in trees if len(tree)]
    return non_empty[0] if len(non_empty) == 1 else _union(non_empty)


def _union(trees: Sequence[Tree], numbers: Iterable[int] | None = None) -> Tree:
    """Merge trees, node by node. numbers: the nodes to take; None: all."""
    union = Tree()
    for tree in trees:
        new_number = {ROOT: ROOT}
        for node in range(len(tree)) if numbers is None else numbers:
            parent = new_number[tree.parents[node]]
            new_number[node] = union.add(tree.tokens[node], parent, tree.drafters[node], tree.confidences[node])
    return union


def ancestors(parents: Sequence[int]) -> Bools:
    """(M, M): True where node n is an ancestor of node m, or m itself."""
    is_ancestor = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            is_ancestor[node] |= is_ancestor[parent]
    return is_ancestor


def to_nodes(trees: Sequence[Tree]) -> Nodes:
    """Concatenate trees into the control loop's columns over nodes, (M,) each, tree after tree."""
    sizes = column([len(tree) for tree in trees])
    first = np.cumsum(sizes) - sizes
    parents = column([parent for tree in trees for parent in tree.parents])
    return Nodes(
        request=np.repeat(np.arange(len(trees)), sizes),
        parent=np.where(parents == ROOT, ROOT, parents + np.repeat(first, sizes)),
        drafter=column([drafter for tree in trees for drafter in tree.drafters]),
        depth=column([depth for tree in trees for depth in tree.depths]),
        rank=column([rank for tree in trees for rank in tree.ranks]),
        confidence=np.array([confidence for tree in trees for confidence in tree.confidences], np.float64),
    )


def column(values: list[int]) -> Ints:
    """Convert to a column of the control loop, (len(values),) int64."""
    return np.array(values, np.int64)
