"""Trees of proposals: who hangs on whom, whose a node is, and what the loop is told of it."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given
from outrider_runtime.control.data.forest import ROOT
from outrider_runtime.torch_engine.tree import NO_NODE, Tree, ancestors, chain, merged, nodes_of

EAGLE, DRAFT, LOOKUP = range(3)


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> Tree:
    tree = Tree()
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.integers(ROOT, len(tree) - 1))
        tree.add(draw(st.integers(0, 3)), parent, draw(st.sampled_from([EAGLE, DRAFT, LOOKUP])), float(len(tree)))
    return tree


def paths(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.path(node)) for node in range(len(tree))}


def test_a_node_is_its_first_drafters() -> None:
    """Tries are united: who proposes the same path later adds nothing, and who goes on from it adds what is new."""
    head = Tree()
    first = head.add(7, ROOT, EAGLE, 2.0)
    head.add(8, ROOT, EAGLE, -1.0)
    head.add(9, first, EAGLE, 1.0)
    union = merged([head, chain([7, 5, 6], LOOKUP, 3.0), chain([8], DRAFT, 0.5), chain([4], DRAFT, 0.5)])
    assert union.tokens == [7, 8, 9, 5, 6, 4]
    assert union.parents == [ROOT, ROOT, 0, 0, 3, ROOT]
    assert union.drafters == [EAGLE, EAGLE, EAGLE, LOOKUP, LOOKUP, DRAFT]
    assert union.confidences == [2.0, -1.0, 1.0, 3.0, 3.0, 0.5]
    assert union.depths == [1, 1, 2, 2, 3, 1]
    assert union.ranks == [0, 1, 0, 1, 0, 2]
    assert union.child(0, 5) == 3
    assert union.child(1, 5) == union.child(ROOT, 9) == NO_NODE


@given(several=st.lists(trees(), max_size=4))
def test_a_union_holds_every_path_once(several: list[Tree]) -> None:
    union = merged(several)
    assert paths(union) == set().union(*map(paths, several))
    assert len(paths(union)) == len(union)
    for node, parent in enumerate(union.parents):
        assert parent < node
        assert union.child(parent, union.tokens[node]) == node
        assert union.depths[node] == len(union.path(node))
    for parent in range(ROOT, len(union)):
        ranks = [union.ranks[node] for node, one in enumerate(union.parents) if one == parent]
        assert ranks == list(range(len(ranks)))


@given(tree=trees(), depth=st.integers(0, 5))
def test_what_is_too_deep_goes_and_nothing_else_changes(tree: Tree, depth: int) -> None:
    """A tree that is not cut is not built again."""
    kept = tree.within(depth)
    assert (kept is tree) == (len(kept) == len(tree))
    assert paths(kept) == {path for path in paths(tree) if len(path) <= depth}
    stays = [node for node, own in enumerate(tree.depths) if own <= depth]
    for column in ("tokens", "drafters", "confidences", "depths", "ranks"):
        assert getattr(kept, column) == [getattr(tree, column)[node] for node in stays]


@given(tree=trees())
def test_a_node_hangs_on_its_path(tree: Tree) -> None:
    for node, hangs in enumerate(ancestors(tree.parents)):
        assert [tree.tokens[one] for one in hangs.nonzero()[0]] == tree.path(node)


@given(several=st.lists(trees(), max_size=4))
def test_the_loop_is_told_of_every_node(several: list[Tree]) -> None:
    """Numbers of nodes go on from tree to tree."""
    nodes = nodes_of(several)
    first = 0
    for request, tree in enumerate(several):
        own = slice(first, first + len(tree))
        assert (nodes.request[own] == request).all()
        assert nodes.parent[own].tolist() == [one if one == ROOT else first + one for one in tree.parents]
        for column, told in zip(("drafters", "depths", "ranks", "confidences"), nodes[2:], strict=True):
            assert told[own].tolist() == getattr(tree, column)
        first += len(tree)
    assert all(len(column) == first for column in nodes)
