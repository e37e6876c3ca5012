"""Beam search: the tree of a request's most probable paths (AdaServe, section 4.1). A chain is a beam of width 1.

For each depth the drafter runs over the nodes of the depth before; of all their children, the w with the most probable
paths are kept. The greedy chain is always kept: when the target accepts the drafter's first choices more often than the
drafter's probabilities say, siblings would push it out, and the tree would accept fewer tokens than a chain.

A chain for a request without a seed is drawn token by token instead, for `rejection`.
Shapes: R nodes of the deepest level, request after request; w children of each node.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from outrider_runtime.control.plans import ROOT
from outrider_runtime.torch_engine.drafting import DraftTask
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.model_runner import Segment
from outrider_runtime.torch_engine.seeded_noise import Noise
from outrider_runtime.torch_engine.token_sampling import Likeliest, Row, describe_draw
from outrider_runtime.torch_engine.tree import Tree, ancestors

MAX_WIDTH = 4
"""Most nodes that a beam keeps at each depth."""
MIN_DOUBT = 1e-12
"""Lowest 1 - p of a token, so that the log-odds of a token with p = 1 are finite."""


class Child(NamedTuple):
    """A candidate for the next depth."""

    path: float
    """Log-probability of the whole path to the child."""
    source: int
    """Index of its parent among the R nodes."""
    parent: int
    """Number of its parent in the tree."""
    token: int
    logprob: float
    """Log-probability of the child, given its parent."""


class Beam:
    """Grows one tree for each request, depth by depth, all requests at once."""

    def __init__(self, requests: Sequence[Request], task: DraftTask) -> None:
        self.trees = [Tree() for _ in requests]
        self.width = task.width
        self.sources: list[int] = []
        """(R,): index of each node's parent among the nodes of the depth before."""
        self._requests = requests
        self._drafter = task.drafter
        self._is_drawn = [task.width == 1 and request.sampling.uses_rejection for request in requests]
        self._last: list[list[int]] = [[ROOT] for _ in requests]
        """The nodes of each request's deepest level."""
        self._greedy_ends = [ROOT] * len(requests)
        """The last node of each request's greedy chain."""
        self._paths: list[dict[int, float]] = [{ROOT: 0.0} for _ in requests]
        """Node -> log-probability of the path to it, for each request."""

    @property
    def names(self) -> list[str]:
        return [request.name for request in self._requests]

    @property
    def owners(self) -> list[int]:
        """(R,): index of each node's request."""
        return [number for number, nodes in enumerate(self._last) for _ in nodes]

    def rows(self) -> list[Row]:
        """(R,): the draw of the token after each node of the deepest level."""
        return [
            describe_draw(request, tree.path(node), Noise.DRAFT if is_drawn else Noise.TARGET)
            for request, tree, nodes, is_drawn in zip(
                self._requests, self.trees, self._last, self._is_drawn, strict=True
            )
            for node in nodes
        ]

    def segments(self, positions: Sequence[int]) -> list[Segment]:
        """List the nodes of the deepest level as segments. positions: position of each request's first node."""
        return [
            Segment(name, [tree.tokens[node] for node in nodes], position, ancestors(tree.parents)[nodes])
            for name, tree, nodes, position in zip(self.names, self.trees, self._last, positions, strict=True)
        ]

    def grow(self, candidates: Likeliest) -> None:
        """Add a depth. candidates: (R, w), the best children of each node of the deepest level."""
        logprobs = candidates.logprobs.tolist()
        tokens = candidates.tokens.tolist()
        self.sources = []
        first = 0  # index of the request's first node among the R
        for number, nodes in enumerate(self._last):
            paths = self._paths[number]
            children = [
                Child(paths[node] + logprob, source, node, token, logprob)
                for source, node in enumerate(nodes, first)
                for logprob, token in zip(logprobs[source], tokens[source], strict=True)
                if logprob > -math.inf
            ]
            best = heapq.nlargest(self.width, children, key=_path)
            chained = [child for child in children if child.parent == self._greedy_ends[number]]
            greedy = max(chained, key=_path, default=None)
            if greedy is not None and greedy not in best:
                best[-1] = greedy
            self._last[number] = [self._add(number, child) for child in best]
            if greedy is not None:
                self._greedy_ends[number] = self._last[number][best.index(greedy)]
            if best and candidates.drawn_from is not None:
                self._note_distribution(number, candidates.drawn_from[first])
            self.sources += [child.source for child in best]
            first += len(nodes)

    def _note_distribution(self, number: int, drawn_from: Tensor) -> None:
        """Keep the distribution, (V,), of a request's new node if that node was drawn."""
        if self._is_drawn[number]:
            tree = self.trees[number]
            tree.drawn_from = [*tree.drawn_from, drawn_from]

    def _add(self, number: int, child: Child) -> int:
        """Add a child to a request's tree and return its number. A drawn node has no confidence: see `rejection`."""
        confidence = math.nan if self._is_drawn[number] else log_odds(child.logprob)
        node = self.trees[number].add(child.token, child.parent, self._drafter, confidence)
        self._paths[number][node] = child.path
        return node


def _path(child: Child) -> float:
    return child.path


def log_odds(logprob: float) -> float:
    """log(p / (1 - p)), from log p."""
    return logprob - math.log(max(-math.expm1(logprob), MIN_DOUBT))
