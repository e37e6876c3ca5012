"""Answers follow the target's distribution, whatever was proposed; and a wrong verification is detected.

Target and draft are tables over five tokens, a row for each last token. Proposing, drawing, judging and walking are
the engine's own. The joint distribution of an answer's first three tokens is compared with the target's.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from outrider_runtime.control.plans import ROOT
from outrider_runtime.torch_engine import rejection
from outrider_runtime.torch_engine.commit import walk
from outrider_runtime.torch_engine.drafting import DraftTask
from outrider_runtime.torch_engine.drafts.beam import Beam
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops
from outrider_runtime.torch_engine.rejection import Chain, judge
from outrider_runtime.torch_engine.seeded_noise import uniform
from outrider_runtime.torch_engine.token_sampling import Row, compute_weights, describe_draw, draw, likeliest
from outrider_runtime.torch_engine.tree import NO_NODE, Tree

from tests.unit.torch_engine.engines import Letters

pytestmark = pytest.mark.slow
TOKENS, OUTPUTS = 5, 3
DRAWS, DRAWS_OF_A_BUG, AT_ONCE = 200_000, 10_000, 5_000
FIRST = 0
"""The prompt's only token."""
TARGET = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))
DRAFT = TARGET + torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(2))
SAMPLING = Sampling(is_seeded=False, temperature=0.9, top_p=0.95)
Drawn = Mapping[int, int]
"""Place -> the token drawn after it."""


@dataclasses.dataclass
class Verifier:
    """Verifies as the engine does. A subclass plants a bug in one part."""

    width: int = 1

    def prepared(self, tree: Tree, _last: int) -> Tree:
        """Return the tree to verify. _last: the token that it follows."""
        return tree

    def drawn(self, trees: Sequence[Tree], rows: Sequence[Row], weights: torch.Tensor) -> list[Drawn]:
        """Draw and judge a token after each place. rows, weights: all places of all trees."""
        firsts = np.cumsum([0, *(len(tree) + 1 for tree in trees)]).tolist()
        chains = [
            Chain(first, tree.tokens, tree.drawn_from)  # type: ignore[arg-type]
            for first, tree in zip(firsts, trees, strict=False)
            if tree.drawn_from
        ]
        tokens = judge(chains, weights, rows, draw(weights, rows))
        return [dict(enumerate(tokens[first:end], ROOT)) for first, end in pairwise(firsts)]


def p_value(verifier: Verifier, draws: int) -> float:
    """Chi-square test of whether the first three tokens follow the target's distribution."""
    counts = np.zeros((TOKENS,) * OUTPUTS)
    for first in range(0, draws, AT_ONCE):
        for answer in answered(verifier, range(first, min(draws, first + AT_ONCE))):
            counts[tuple(answer)] += 1
    expected = draws * joint()
    kept = expected > 0
    if counts[~kept].any():
        return 0.0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    return float(torch.special.gammaincc(torch.tensor((kept.sum() - 1) / 2), torch.tensor(statistic / 2)))


def joint() -> np.ndarray:
    """The target's joint distribution of three tokens, (5, 5, 5)."""
    p = compute_weights(TARGET, [Row(SAMPLING, 0)] * TOKENS).softmax(-1).numpy()
    joint: np.ndarray = np.einsum("a,ab,bc->abc", p[FIRST], p, p)
    return joint


def answered(verifier: Verifier, seeds: range) -> list[list[int]]:
    requests = [
        Request("", [FIRST], 1, Stops(OUTPUTS), dataclasses.replace(SAMPLING, seed=seed), Letters()) for seed in seeds
    ]
    unfinished = requests
    while unfinished:
        trees = [
            verifier.prepared(tree, request.tokens[-1])
            for tree, request in zip(proposed(unfinished, verifier.width), unfinished, strict=True)
        ]
        places = [
            (request, tree, node)
            for request, tree in zip(unfinished, trees, strict=True)
            for node in range(ROOT, len(tree))
        ]
        rows = [describe_draw(request, tree.path(node)) for request, tree, node in places]
        lasts = [tree.tokens[node] if node != ROOT else request.tokens[-1] for request, tree, node in places]
        drawn = verifier.drawn(trees, rows, compute_weights(TARGET[lasts], rows))
        for request, tree, drawn_tokens in zip(unfinished, trees, drawn, strict=True):
            request.tokens += walk(tree, drawn_tokens).tokens
        unfinished = [request for request in unfinished if request.emitted < OUTPUTS]
    return [request.tokens[1 : 1 + OUTPUTS] for request in requests]


def proposed(requests: Sequence[Request], width: int) -> list[Tree]:
    """Propose for each request, no deeper than its answer can still get."""
    trees = {id(request): Tree() for request in requests}
    for depth in range(1, OUTPUTS):
        alike = [request for request in requests if OUTPUTS - request.emitted - 1 == depth]
        trees |= zip(map(id, alike), beamed(alike, width, depth), strict=True)
    return [trees[id(request)] for request in requests]


def beamed(requests: Sequence[Request], width: int, depth: int) -> list[Tree]:
    beam = Beam(requests, DraftTask(0, [True] * len(requests), depth, width))
    lasts = [request.tokens[-1] for request in requests]
    for done in range(1, depth + 1):
        beam.grow(likeliest(DRAFT[lasts], beam.rows(), width))
        lasts = [
            token
            for tree in beam.trees
            for token, node_depth in zip(tree.tokens, tree.depths, strict=True)
            if node_depth == done
        ]
    return beam.trees


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Switch off the garbage collector: with so many small objects it would take most of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("width", [1, 3], ids=["a chain that is drawn", "a beam"])
def test_answers_follow_target_distribution(width: int) -> None:
    assert p_value(Verifier(width), DRAWS) > 1e-3


# -- six bugs, each planted alone --------------------------------------------------------------------------------------


def drafts_own(tree: Tree, last: int, sampling: Sampling) -> list[torch.Tensor]:
    """List the draft's probabilities after each token of a chain, (5,) each."""
    rows = DRAFT[[last, *tree.tokens][: len(tree)]]
    return list(compute_weights(rows, [Row(sampling, 0)] * len(rows)).softmax(-1))


class PrunedBeam(Verifier):
    """Bug: p / q for proposals that are the best of a beam and not draws from q."""

    def prepared(self, tree: Tree, last: int) -> Tree:
        best, node = list[int](), ROOT
        while (node := next((n for n, parent in enumerate(tree.parents) if parent == node), NO_NODE)) != NO_NODE:
            best.append(node)
        path = tree.only(best)
        path.drawn_from = drafts_own(path, last, SAMPLING)
        return path


class TopPOnOneSide(Verifier):
    """Bug: the draft draws with top-p and is judged as if it drew without."""

    def prepared(self, tree: Tree, last: int) -> Tree:
        tree.drawn_from = drafts_own(tree, last, dataclasses.replace(SAMPLING, top_p=1.0))
        return tree


class CutByTheDrawnTokensProbability(Verifier):
    """Bug: the chain is cut at a drawn token that the draft finds improbable."""

    def prepared(self, tree: Tree, _last: int) -> Tree:
        likely = [float(q[token]) > 0.4 for token, q in zip(tree.tokens, tree.drawn_from, strict=True)]  # type: ignore[index]
        return tree.within(next((depth for depth, holds in enumerate(likely) if not holds), len(tree)))


class SiblingKept(Verifier):
    """Bug: when the target draws none of the children, the first of them is kept."""

    def drawn(self, trees: Sequence[Tree], rows: Sequence[Row], weights: torch.Tensor) -> list[Drawn]:
        return [
            {place: self._kept(tree, place, token) for place, token in own.items()}
            for tree, own in zip(trees, super().drawn(trees, rows, weights), strict=True)
        ]

    def _kept(self, tree: Tree, place: int, token: int) -> int:
        children = [tree.tokens[node] for node, parent in enumerate(tree.parents) if parent == place]
        return token if token in children or not children else children[0]


class BonusFromTheWrongRow(Verifier):
    """Bug: the bonus token is drawn from the row before its own."""

    def drawn(self, trees: Sequence[Tree], rows: Sequence[Row], weights: torch.Tensor) -> list[Drawn]:
        ends = np.cumsum([len(tree) + 1 for tree in trees]) - 1
        weights[ends] = weights[ends - 1]
        return super().drawn(trees, rows, weights)


class ResidualNotRenormalised(Verifier):
    """Bug: a uniform number is looked up in the sums of max(0, p - q), which end below 1."""

    def drawn(self, trees: Sequence[Tree], rows: Sequence[Row], weights: torch.Tensor) -> list[Drawn]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(rejection, "draw", self._through_sums)
            return super().drawn(trees, rows, weights)

    def _through_sums(self, weights: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        u = uniform([row.sampling.seed + 5 for row in rows], [row.place for row in rows], 1, weights.device)
        tokens: list[int] = (weights.exp().cumsum(-1) < u).sum(-1).clamp(max=TOKENS - 1).tolist()
        return tokens


@pytest.mark.parametrize(
    "bug",
    [
        PrunedBeam(3), ResidualNotRenormalised(), SiblingKept(3), TopPOnOneSide(), BonusFromTheWrongRow(),
        CutByTheDrawnTokensProbability(),
    ],
    ids=lambda bug: type(bug).__name__,
)  # fmt: skip
def test_wrong_verifier_is_detected(bug: Verifier) -> None:
    """Each planted bug breaks the distribution, so the test above can fail."""
    assert p_value(bug, DRAWS_OF_A_BUG) < 1e-6
