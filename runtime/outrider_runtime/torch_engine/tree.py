"""What drafters propose for a request: a tree of tokens. A chain is a tree of width 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider_runtime.control.data.batch import Bools, Ints
from outrider_runtime.control.data.forest import ROOT, Nodes

NO_NODE = -2


@dataclass(slots=True, eq=False)
class Tree:
    """Columns over nodes, parents before their children; a node is known by its number."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """ROOT for a node that follows the request's last known token."""
    drafters: list[int] = field(default_factory=list)
    """Who proposed each node first."""
    confidences: list[float] = field(default_factory=list)
    """As `control.forest.Forest` has them."""
    depths: list[int] = field(default_factory=list)
    """1 below ROOT."""
    ranks: list[int] = field(default_factory=list)
    """0 for the first child of its parent."""
    drawn_from: Sequence[object] = ()
    """Of a chain whose tokens were drawn, the distribution of each; otherwise empty."""
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _siblings: Counter[int] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, drafter: int, confidence: float) -> int:
        """The parent's child with this token; it is new unless somebody proposed it before."""
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
        """NO_NODE where nobody proposed it."""
        return self._children.get((parent, token), NO_NODE)

    def path(self, node: int) -> list[int]:
        """The tokens from the root's child to the node; none for ROOT."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def only(self, numbers: Iterable[int]) -> Tree:
        """The tree of these nodes, which come in their order and each with its parent."""
        part = _united([self], numbers)
        part.drawn_from = self.drawn_from[: len(part)]
        return part

    def within(self, depth: int) -> Tree:
        """Its nodes down to this depth."""
        if max(self.depths, default=0) <= depth:
            return self
        return self.only(number for number, own in enumerate(self.depths) if own <= depth)


def chain(tokens: Iterable[int], drafter: int, confidence: float) -> Tree:
    tree, node = Tree(), ROOT
    for token in tokens:
        node = tree.add(token, node, drafter, confidence)
    return tree


def merged(trees: Sequence[Tree]) -> Tree:
    """The union of tries (SpecInfer, section 3)."""
    some = [tree for tree in trees if len(tree)]
    return some[0] if len(some) == 1 else _united(some)


def _united(trees: Sequence[Tree], numbers: Iterable[int] | None = None) -> Tree:
    union = Tree()
    for tree in trees:
        place = {ROOT: ROOT}
        for node in range(len(tree)) if numbers is None else numbers:
            parent = place[tree.parents[node]]
            place[node] = union.add(tree.tokens[node], parent, tree.drafters[node], tree.confidences[node])
    return union


def ancestors(parents: Sequence[int]) -> Bools:
    """(M, M): node m hangs on node n, or is it."""
    sees = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            sees[node] |= sees[parent]
    return sees


def nodes_of(trees: Sequence[Tree]) -> Nodes:
    """As columns of the loop, tree after tree."""
    sizes = column([len(tree) for tree in trees])
    first = np.cumsum(sizes) - sizes
    parents = column([one for tree in trees for one in tree.parents])
    return Nodes(
        request=np.repeat(np.arange(len(trees)), sizes),
        parent=np.where(parents == ROOT, ROOT, parents + np.repeat(first, sizes)),
        drafter=column([one for tree in trees for one in tree.drafters]),
        depth=column([one for tree in trees for one in tree.depths]),
        rank=column([one for tree in trees for one in tree.ranks]),
        confidence=np.array([one for tree in trees for one in tree.confidences]),
    )


def column(values: list[int]) -> Ints:
    """(N,): of the loop's integers."""
    return np.array(values, np.int64)
