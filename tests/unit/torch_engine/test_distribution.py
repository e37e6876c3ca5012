"""Answers follow the target's distribution, whatever was proposed; and a verification that is wrong is found out.

Target and draft are tables over five tokens, a row for each last token. Proposing, drawing, judging and walking are the
engine's own; the joint distribution of an answer's first three tokens is compared with the target's.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from outrider_runtime.control.data.forest import ROOT
from outrider_runtime.torch_engine import rejection
from outrider_runtime.torch_engine.commit import walk
from outrider_runtime.torch_engine.drafting import DraftTask
from outrider_runtime.torch_engine.drafts.beam import Beam
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops
from outrider_runtime.torch_engine.rejection import Chain, judge
from outrider_runtime.torch_engine.seeded_noise import uniform
from outrider_runtime.torch_engine.token_sampling import Row, draw, likeliest, row_of, weights_of
from outrider_runtime.torch_engine.tree import NO_NODE, Tree

from tests.unit.torch_engine.engines import Letters

pytestmark = pytest.mark.slow
TOKENS, OUTPUTS = 5, 3
DRAWS, DRAWS_OF_A_BUG, AT_ONCE = 200_000, 10_000, 5_000
FIRST = 0
"""The prompt."""
TARGET = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))
DRAFT = TARGET + torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(2))
SAMPLING = Sampling(is_seeded=False, temperature=0.9, top_p=0.95)
Drawn = Mapping[int, int]
"""Place -> the token behind it."""


@dataclasses.dataclass
class Verifier:
    """The engine's own. A bug overrides a part."""

    width: int = 1

    def prepared(self, tree: Tree, _last: int) -> Tree:
        """What was proposed behind the token `last`, as it is verified."""
        return tree

    def drawn(self, trees: Sequence[Tree], rows: Sequence[Row], weights: torch.Tensor) -> list[Drawn]:
        """rows, weights: of all places of all trees."""
        firsts = np.cumsum([0, *(len(tree) + 1 for tree in trees)]).tolist()
        chains = [
            Chain(first, tree.tokens, tree.drawn_from)  # type: ignore[arg-type]
            for first, tree in zip(firsts, trees, strict=False)
            if tree.drawn_from
        ]
        tokens = judge(chains, weights, rows, draw(weights, rows))
        return [dict(enumerate(tokens[first:end], ROOT)) for first, end in pairwise(firsts)]


def p_value(verifier: Verifier, draws: int) -> float:
    """Of the chi-square test that the first three tokens are the target's own."""
    counts = np.zeros((TOKENS,) * OUTPUTS)
    for first in range(0, draws, AT_ONCE):
        for one in answered(verifier, range(first, min(draws, first + AT_ONCE))):
            counts[tuple(one)] += 1
    wanted = draws * joint()
    kept = wanted > 0
    if counts[~kept].any():
        return 0.0
    statistic = ((counts - wanted)[kept] ** 2 / wanted[kept]).sum()
    return float(torch.special.gammaincc(torch.tensor((kept.sum() - 1) / 2), torch.tensor(statistic / 2)))


def joint() -> np.ndarray:
    """(5, 5, 5)"""
    p = weights_of(TARGET, [Row(SAMPLING, 0)] * TOKENS).softmax(-1).numpy()
    joint: np.ndarray = np.einsum("a,ab,bc->abc", p[FIRST], p, p)
    return joint


def answered(verifier: Verifier, seeds: range) -> list[list[int]]:
    requests = [
        Request("", [FIRST], 1, Stops(OUTPUTS), dataclasses.replace(SAMPLING, seed=seed), Letters()) for seed in seeds
    ]
    going = requests
    while going:
        trees = [
            verifier.prepared(tree, one.tokens[-1])
            for tree, one in zip(proposed(going, verifier.width), going, strict=True)
        ]
        places = [(one, tree, node) for one, tree in zip(going, trees, strict=True) for node in range(ROOT, len(tree))]
        rows = [row_of(one, tree.path(node)) for one, tree, node in places]
        lasts = [tree.tokens[node] if node != ROOT else one.tokens[-1] for one, tree, node in places]
        drawn = verifier.drawn(trees, rows, weights_of(TARGET[lasts], rows))
        for one, tree, own in zip(going, trees, drawn, strict=True):
            one.tokens += walk(tree, own).tokens
        going = [one for one in going if one.emitted < OUTPUTS]
    return [one.tokens[1 : 1 + OUTPUTS] for one in requests]


def proposed(requests: Sequence[Request], width: int) -> list[Tree]:
    """No deeper than could be part of the answer."""
    trees = {id(one): Tree() for one in requests}
    for depth in range(1, OUTPUTS):
        some = [one for one in requests if OUTPUTS - one.emitted - 1 == depth]
        trees |= zip(map(id, some), beamed(some, width, depth), strict=True)
    return [trees[id(one)] for one in requests]


def beamed(requests: Sequence[Request], width: int, depth: int) -> list[Tree]:
    beam = Beam(requests, DraftTask(0, [True] * len(requests), depth, width))
    lasts = [one.tokens[-1] for one in requests]
    for done in range(1, depth + 1):
        beam.grow(likeliest(DRAFT[lasts], beam.rows(), width))
        lasts = [
            token for tree in beam.trees for token, own in zip(tree.tokens, tree.depths, strict=True) if own == done
        ]
    return beam.trees


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Among so many small objects it would take more time than all the rest."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("width", [1, 3], ids=["a chain that is drawn", "a beam"])
def test_answers_follow_the_targets_distribution(width: int) -> None:
    assert p_value(Verifier(width), DRAWS) > 1e-3


# -- six bugs, each planted alone --------------------------------------------------------------------------------------


def drafts_own(tree: Tree, last: int, sampling: Sampling) -> list[torch.Tensor]:
    """(5,) each: along a chain, the draft's probabilities behind each token."""
    rows = DRAFT[[last, *tree.tokens][: len(tree)]]
    return list(weights_of(rows, [Row(sampling, 0)] * len(rows)).softmax(-1))


class PrunedBeam(Verifier):
    """p / q, where the proposals are the best of a beam, and no draws from q."""

    def prepared(self, tree: Tree, last: int) -> Tree:
        best, node = list[int](), ROOT
        while (node := next((n for n, parent in enumerate(tree.parents) if parent == node), NO_NODE)) != NO_NODE:
            best.append(node)
        path = tree.only(best)
        path.drawn_from = drafts_own(path, last, SAMPLING)
        return path


class TopPOnOneSide(Verifier):
    """The draft draws with top-p, and is judged as if it had not."""

    def prepared(self, tree: Tree, last: int) -> Tree:
        tree.drawn_from = drafts_own(tree, last, dataclasses.replace(SAMPLING, top_p=1.0))
        return tree


class CutByTheDrawnTokensProbability(Verifier):
    """What the draft thought improbable once it was drawn is not verified."""

    def prepared(self, tree: Tree, _last: int) -> Tree:
        likely = [float(q[token]) > 0.4 for token, q in zip(tree.tokens, tree.drawn_from, strict=True)]  # type: ignore[index]
        return tree.within(next((depth for depth, holds in enumerate(likely) if not holds), len(tree)))


class SiblingKept(Verifier):
    """Where the target draws none of the children, the first of them is kept."""

    def drawn(self, trees: Sequence[Tree], rows: Sequence[Row], weights: torch.Tensor) -> list[Drawn]:
        return [
            {place: self._kept(tree, place, token) for place, token in own.items()}
            for tree, own in zip(trees, super().drawn(trees, rows, weights), strict=True)
        ]

    def _kept(self, tree: Tree, place: int, token: int) -> int:
        children = [tree.tokens[node] for node, parent in enumerate(tree.parents) if parent == place]
        return token if token in children or not children else children[0]


class BonusFromTheWrongRow(Verifier):
    """The bonus token is drawn from the row before."""

    def drawn(self, trees: Sequence[Tree], rows: Sequence[Row], weights: torch.Tensor) -> list[Drawn]:
        ends = np.cumsum([len(tree) + 1 for tree in trees]) - 1
        weights[ends] = weights[ends - 1]
        return super().drawn(trees, rows, weights)


class ResidualNotRenormalised(Verifier):
    """A uniform number goes through the sums of max(0, p - q), which end below 1."""

    def drawn(self, trees: Sequence[Tree], rows: Sequence[Row], weights: torch.Tensor) -> list[Drawn]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(rejection, "draw", self._through_sums)
            return super().drawn(trees, rows, weights)

    def _through_sums(self, weights: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        luck = uniform([row.sampling.seed + 5 for row in rows], [row.place for row in rows], 1, weights.device)
        found: list[int] = (weights.exp().cumsum(-1) < luck).sum(-1).clamp(max=TOKENS - 1).tolist()
        return found


@pytest.mark.parametrize(
    "bug",
    [
        PrunedBeam(3), ResidualNotRenormalised(), SiblingKept(3), TopPOnOneSide(), BonusFromTheWrongRow(),
        CutByTheDrawnTokensProbability(),
    ],
    ids=lambda bug: type(bug).__name__,
)  # fmt: skip
def test_a_verification_that_is_wrong_is_found_out(bug: Verifier) -> None:
    """The test above could fail: each of these breaks the promise in one place."""
    assert p_value(bug, DRAWS_OF_A_BUG) < 1e-6
