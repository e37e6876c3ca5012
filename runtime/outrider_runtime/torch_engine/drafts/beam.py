"""Beam search: the tree of a request's most probable paths (AdaServe, section 4.1). A chain is a beam of width 1.

At each depth a drafter runs over the nodes of the one before, and of all their children the w with the most probable
paths are the next. The greedy chain stays among them: where the target believes the drafter more than that believes
itself, siblings would push it out, and a tree would accept less than a chain. A chain for a request without a seed is
drawn instead, token by token, for `rejection`.
Shapes: R nodes of the last depth, all requests' together, request after request.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from outrider_runtime.control.data.forest import ROOT
from outrider_runtime.torch_engine.drafting import DraftTask
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.model_runner import Segment
from outrider_runtime.torch_engine.seeded_noise import Noise
from outrider_runtime.torch_engine.token_sampling import Likeliest, Row, row_of
from outrider_runtime.torch_engine.tree import Tree, ancestors

WIDEST = 4
"""Nodes that a beam of this engine keeps at a depth."""
LEAST_DOUBT = 1e-12
"""Of a token that a drafter is sure of, so that its log-odds are finite."""


class Child(NamedTuple):
    path: float
    """Log-probability of the path to it."""
    source: int
    """Its parent's place among the R nodes."""
    parent: int
    token: int
    logprob: float
    """Of its edge."""


class Beam:
    def __init__(self, requests: Sequence[Request], ask: DraftTask) -> None:
        self.trees = [Tree() for _ in requests]
        self.width = ask.width
        self.sources: list[int] = []
        """(R,): among the R of the depth before, the place of each node's parent."""
        self._requests, self._drafter = requests, ask.drafter
        self._is_drawn = [ask.width == 1 and one.sampling.is_free for one in requests]
        self._last: list[list[int]] = [[ROOT] for _ in requests]
        self._chained = [ROOT] * len(requests)
        """The last node of each request's greedy chain."""
        self._paths: list[dict[int, float]] = [{ROOT: 0.0} for _ in requests]

    @property
    def names(self) -> list[str]:
        return [one.name for one in self._requests]

    @property
    def owners(self) -> list[int]:
        """(R,): of each node of the last depth, its request's place."""
        return [number for number, nodes in enumerate(self._last) for _ in nodes]

    def rows(self) -> list[Row]:
        """(R,): what comes behind each node of the last depth."""
        return [
            row_of(request, tree.path(node), Noise.DRAFT if is_drawn else Noise.TARGET)
            for request, tree, nodes, is_drawn in zip(
                self._requests, self.trees, self._last, self._is_drawn, strict=True
            )
            for node in nodes
        ]

    def segments(self, positions: Sequence[int]) -> list[Segment]:
        """The last depth's nodes, behind those of all others. positions: of each request's first node."""
        return [
            Segment(name, [tree.tokens[node] for node in nodes], position, ancestors(tree.parents)[nodes])
            for name, tree, nodes, position in zip(self.names, self.trees, self._last, positions, strict=True)
        ]

    def grow(self, found: Likeliest) -> None:
        """found: (R, w), the best children of each node of the last depth."""
        logprobs, tokens = found.logprobs.tolist(), found.tokens.tolist()
        self.sources, first = [], 0
        for number, nodes in enumerate(self._last):
            paths = self._paths[number]
            children = [
                Child(paths[node] + logprob, source, node, token, logprob)
                for source, node in enumerate(nodes, first)
                for logprob, token in zip(logprobs[source], tokens[source], strict=True)
                if logprob > -math.inf
            ]
            best = heapq.nlargest(self.width, children, key=_path)
            chain = max((one for one in children if one.parent == self._chained[number]), key=_path, default=None)
            if chain is not None and chain not in best:
                best[-1] = chain
            self._last[number] = [self._add(number, child) for child in best]
            if chain is not None:
                self._chained[number] = self._last[number][best.index(chain)]
            if best and found.drawn_from is not None:
                self._note(number, found.drawn_from[first])
            self.sources += [child.source for child in best]
            first += len(nodes)

    def _note(self, number: int, drawn_from: Tensor) -> None:
        """drawn_from: (V,), of the request's new node."""
        if self._is_drawn[number]:
            tree = self.trees[number]
            tree.drawn_from = [*tree.drawn_from, drawn_from]

    def _add(self, number: int, child: Child) -> int:
        confidence = math.nan if self._is_drawn[number] else log_odds(child.logprob)
        node = self.trees[number].add(child.token, child.parent, self._drafter, confidence)
        self._paths[number][node] = child.path
        return node


def _path(child: Child) -> float:
    return child.path


def log_odds(logprob: float) -> float:
    return logprob - math.log(max(-math.expm1(logprob), LEAST_DOUBT))
