"""Baselines with trees: SpecInfer's static tree, and AdaServe as published."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from outrider_runtime.control.batch import Batch, Bools, Floats, Ints
from outrider_runtime.control.plans import ROOT, DraftPlan, Forest, Outcome, Purpose, VerifyPlan

SPECINFER = (1, 1, 3, 1, 1, 1, 1, 1)
"""AdaServe's baseline (section 6.1): children of each node, depth by depth."""
N_MAX = 8
"""AdaServe's n_max. The paper gives no value."""
KEEP = 0.9
"""Weight of a new step in the mean step time."""


class _Beaming:
    """One drafter proposes trees of some depth and width for every request, in every step."""

    def __init__(self, drafters: int, drafter: int) -> None:
        self._drafters, self._drafter = drafters, drafter

    def size(self, requests: int) -> tuple[int, int]:
        """Return depth and width of the next trees."""
        raise NotImplementedError

    def plan_draft(self, batch: Batch) -> DraftPlan:
        passes, widths = np.zeros(self._drafters, np.int64), np.ones(self._drafters, np.int64)
        passes[self._drafter], widths[self._drafter] = self.size(max(1, int(batch.decodes.sum())))
        drafter_order = np.full((1, len(batch)), self._drafter, np.int64)
        feed = np.zeros((self._drafters, len(batch)), np.int64)
        feed[self._drafter] = batch.missing[self._drafter]
        return DraftPlan(passes, widths, drafter_order, feed, Purpose.FIXED)

    def observe(self, outcome: Outcome) -> None: ...

    def release(self, slots: Ints) -> None: ...


def _plan(forest: Forest, nodes: Bools, requests: int) -> VerifyPlan:
    return VerifyPlan(nodes, np.bincount(forest.request[nodes], minlength=requests), Purpose.FIXED)


class StaticTree(_Beaming):
    """SpecInfer: the same tree for every request, cut from the recorded beam."""

    def __init__(self, drafters: int, drafter: int, width: int, children: Sequence[int] = SPECINFER) -> None:
        super().__init__(drafters, drafter)
        self._children, self._width = np.array(children), width

    def size(self, requests: int) -> tuple[int, int]:  # noqa: ARG002
        return len(self._children), self._width

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan:
        nodes = forest.rank < self._children[forest.depth - 1]
        for node in np.flatnonzero(forest.parent != ROOT):  # parents stand before their children
            nodes[node] &= nodes[forest.parent[node]]
        return _plan(forest, nodes, len(batch))


class AdaServe(_Beaming):
    """Algorithm 2 with the depth and width of equations 8 and 9.

    Errors of the published algorithm are corrected: line 15 adds the path's probability, not the edge's; no node is
    taken once the budget is spent (`B >= 0` takes one too many); each root is one of the budget's tokens; the bonus
    token counts for all; the nodes may run out. Requests that need most come first. Path probabilities are the
    drafter's own.
    """

    def __init__(
        self, drafters: int, drafter: int, budget: int, deepest: int, widest: int, tpots_s: Sequence[float]
    ) -> None:  # fmt: skip
        """budget: B, tokens of a pass. deepest, widest: D_max, W_max. tpots_s: of each class."""
        super().__init__(drafters, drafter)
        self._budget, self._deepest, self._widest = budget, deepest, widest
        self._tpots_s = np.array([*tpots_s, math.inf])
        self._step_s = 0.0

    def size(self, requests: int) -> tuple[int, int]:
        share = self._budget / requests
        depth = max(1, min(self._deepest, math.ceil(share)))
        return depth, max(1, min(self._widest, math.floor(share)))

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan:
        paths = path_probabilities(forest)
        left = max(0, self._budget - len(batch))
        nodes = self._for_slos(batch, forest, paths, left)
        others = np.flatnonzero(~nodes)
        best = others[np.argsort(-paths[others], kind="stable")][: max(0, left - int(nodes.sum()))]
        nodes[best] = True
        return _plan(forest, nodes, len(batch))

    def _for_slos(self, batch: Batch, forest: Forest, paths: Floats, left: int) -> Bools:
        """Select for SLOs: A(r) = (l + t_spec) / TPOT - o tokens per request, at most the tree's depth + 1."""
        tpot_s = self._tpots_s[batch.slo_class]
        needed = (batch.elapsed_s + self._step_s) / tpot_s - np.maximum(batch.emitted - 1, 0)
        needed = np.where(batch.emitted > 0, np.minimum(needed, 1 + forest.depth.max(initial=0)), 0.0)
        request = forest.request
        order = np.lexsort((np.arange(len(paths)), -paths, request, -needed[request]))
        gained, taken = _sum_before(paths[order], request[order])
        chosen_nodes = order[(gained < needed[request[order]]) & (taken < N_MAX)]
        nodes = np.zeros(len(paths), bool)
        nodes[chosen_nodes[:left]] = True
        return nodes

    def observe(self, outcome: Outcome) -> None:
        if outcome.tokens and not outcome.batch.prompt.any():
            self._step_s += (1 - KEEP if self._step_s else 1.0) * (outcome.step_s - self._step_s)


def path_probabilities(forest: Forest) -> Floats:
    """Return (M,): products of the drafter's own probabilities along each path."""
    paths = 1 / (1 + np.exp(-forest.confidence))
    for node in np.flatnonzero(forest.parent != ROOT):
        paths[node] *= paths[forest.parent[node]]
    return np.asarray(paths)


def _sum_before(paths: Floats, request: Ints) -> tuple[Floats, Ints]:
    """Return (M,) expected tokens of a request before each of its nodes, bonus token included, and (M,) its nodes
    before. Nodes of a request follow one another."""
    places = np.arange(len(paths))
    starts = np.concatenate(([True], request[1:] != request[:-1]))[: len(paths)]
    begins = np.maximum.accumulate(np.where(starts, places, 0))
    sums = np.concatenate(([0.0], paths.cumsum()))
    return 1.0 + sums[:-1] - sums[begins], places - begins
