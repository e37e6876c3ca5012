"""Trees of proposals: ancestors, merging, cutting, and the control loop's columns."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given
from outrider_runtime.control.plans import ROOT
from outrider_runtime.torch_engine.tree import NO_NODE, Tree, ancestors, chain, merge, to_nodes

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


def test_merged_node_belongs_to_its_first_drafter() -> None:
    """A path that was already proposed adds nothing; a longer one adds only its new nodes."""
    head = Tree()
    first = head.add(7, ROOT, EAGLE, 2.0)
    head.add(8, ROOT, EAGLE, -1.0)
    head.add(9, first, EAGLE, 1.0)
    union = merge([head, chain([7, 5, 6], LOOKUP, 3.0), chain([8], DRAFT, 0.5), chain([4], DRAFT, 0.5)])
    assert union.tokens == [7, 8, 9, 5, 6, 4]
    assert union.parents == [ROOT, ROOT, 0, 0, 3, ROOT]
    assert union.drafters == [EAGLE, EAGLE, EAGLE, LOOKUP, LOOKUP, DRAFT]
    assert union.confidences == [2.0, -1.0, 1.0, 3.0, 3.0, 0.5]
    assert union.depths == [1, 1, 2, 2, 3, 1]
    assert union.ranks == [0, 1, 0, 1, 0, 2]
    assert union.child(0, 5) == 3
    assert union.child(1, 5) == union.child(ROOT, 9) == NO_NODE


@given(several=st.lists(trees(), max_size=4))
def test_merged_tree_has_every_path_once(several: list[Tree]) -> None:
    union = merge(several)
    assert paths(union) == set().union(*map(paths, several))
    assert len(paths(union)) == len(union)
    for node, parent in enumerate(union.parents):
        assert parent < node
        assert union.child(parent, union.tokens[node]) == node
        assert union.depths[node] == len(union.path(node))
    for parent in range(ROOT, len(union)):
        ranks = [union.ranks[node] for node, node_parent in enumerate(union.parents) if node_parent == parent]
        assert ranks == list(range(len(ranks)))


@given(tree=trees(), depth=st.integers(0, 5))
def test_tree_within_depth_keeps_all_other_nodes(tree: Tree, depth: int) -> None:
    """A tree that needs no cut is returned as it is."""
    kept = tree.within(depth)
    assert (kept is tree) == (len(kept) == len(tree))
    assert paths(kept) == {path for path in paths(tree) if len(path) <= depth}
    stays = [node for node, own in enumerate(tree.depths) if own <= depth]
    for column in ("tokens", "drafters", "confidences", "depths", "ranks"):
        assert getattr(kept, column) == [getattr(tree, column)[node] for node in stays]


@given(tree=trees())
def test_ancestors_of_a_node_are_its_path(tree: Tree) -> None:
    for node, is_ancestor in enumerate(ancestors(tree.parents)):
        assert [tree.tokens[ancestor] for ancestor in is_ancestor.nonzero()[0]] == tree.path(node)


@given(several=st.lists(trees(), max_size=4))
def test_columns_hold_every_node_of_all_trees(several: list[Tree]) -> None:
    """Nodes are numbered across all trees."""
    nodes = to_nodes(several)
    first = 0
    for request, tree in enumerate(several):
        rows = slice(first, first + len(tree))
        assert (nodes.request[rows] == request).all()
        assert nodes.parent[rows].tolist() == [parent if parent == ROOT else first + parent for parent in tree.parents]
        for column, values in zip(("drafters", "depths", "ranks", "confidences"), nodes[2:], strict=True):
            assert values[rows].tolist() == getattr(tree, column)
        first += len(tree)
    assert all(len(column) == first for column in nodes)
