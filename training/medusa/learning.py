"""How Medusa heads start, learn and are judged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from training.eagle3.learning import draft_vocabulary, halves_pay, step
from training.medusa.heads import Head, Heads
from training.target import Answer, Target

DEPTH = 4
DEPTH_WEIGHT = 0.8
"""Weight of each depth's loss / that of the one before: a later token counts only if those before it did."""
STRETCH = 64
"""Positions of each answer that a step trains on: many small steps over many answers teach more than few large ones."""
WIDEST = 4
"""Nodes that the engine's trees hold at a depth: so many ranks of a head may count."""
RIDGE = 0.01
"""Share of the states' mean square: how strongly a first guess is drawn to the target's own answer."""


def new_heads(target: Target, answers: Sequence[Answer], size: int) -> Heads:
    """Heads that begin with a guess: of the state so many tokens later, the best linear one (ridge regression)."""
    heads = Heads(target.config.hidden_size, DEPTH, draft_vocabulary(target, answers, size)).to(target.device)
    states = answered(answers)
    for depth, head in enumerate(heads.heads, 1):
        before, after = torch.cat([state[:-depth] for state in states]), torch.cat([state[depth:] for state in states])
        assert isinstance(head, Head)
        head.begin(linear_guess(before, after))
    return heads


def answered(answers: Sequence[Answer]) -> list[Tensor]:
    """The states (M, H) of each, from the one that its first token is drawn from on."""
    return [answer.final[answer.prompt - 1 :].float() for answer in answers]


def linear_guess(before: Tensor, after: Tensor) -> Tensor:
    """(H, H): what states (M, H) are multiplied by to come closest to those after them."""
    squares = before.T @ before
    ridge = RIDGE * squares.diagonal().mean().clamp_min(1e-6) * torch.eye(len(squares), device=before.device)
    guess: Tensor = torch.linalg.solve(squares + ridge, before.T @ after + ridge)
    return guess.T


def stretch(states: Tensor) -> Tensor:
    """A stretch of an answer's states: at most STRETCH, and as many more as heads look ahead."""
    length = STRETCH + DEPTH
    begin = int(torch.randint(max(1, len(states) - length + 1), ()))
    return states[begin : begin + length]


def loss_of(heads: Heads, target: Target, states: Sequence[Tensor]) -> Tensor:
    """Cross-entropy against the target's own distribution over the draft vocabulary, each depth's in its weight.

    states: (M, H) of each answer. Of the target's distribution only the row of the output layer that it expects is
    needed: the logits are products with rows, so their mean is the product with the mean row.
    """
    rows, total = target.output[heads.vocabulary].float(), torch.zeros((), device=target.device)
    with torch.no_grad():
        expected = [(state @ rows.T).float().softmax(-1) @ rows for state in states]  # (M, H)
    for depth, head in enumerate(heads.heads, 1):
        before = torch.cat([state[:-depth] for state in states])  # (m, H)
        after = torch.cat([own[depth:] for own in expected])  # (m, H)
        if len(before):
            proposed = head(before)
            losses = (proposed @ rows.T).float().logsumexp(-1) - (proposed * after).float().sum(-1)  # (m,)
            total = total + DEPTH_WEIGHT ** (depth - 1) * losses.mean()
    return total / sum(DEPTH_WEIGHT**depth for depth in range(DEPTH))


def learn(
    target: Target, heads: Heads, optimizer: torch.optim.Optimizer, answers: Sequence[Answer], rate: float
) -> float:
    """One step; the loss before it."""
    with torch.autocast(target.device, torch.bfloat16, enabled=halves_pay(target.device)):
        loss = loss_of(heads, target, [stretch(states) for states in answered(answers)])
    return step(heads, optimizer, loss, rate)


@torch.no_grad()
def ranked(heads: Heads, target: Target, answers: Sequence[Answer]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each answer's proposals (M, depth, WIDEST), the most probable first, their probabilities, and what the target
    said there (M, depth). M: places with so many tokens behind them."""
    rows, depth = target.output[heads.vocabulary].float(), len(heads.heads)
    for answer in answers:
        states = answer.final[answer.prompt - 1 : len(answer.tokens) - 1 - depth].float()
        if not len(states):
            continue
        probabilities = torch.stack([(state @ rows.T).softmax(-1) for state in heads(states)], 1)
        best = probabilities.topk(min(WIDEST, len(heads.vocabulary)), -1)
        said = answer.tokens[answer.prompt + 1 :].unfold(0, depth, 1)[: len(states)]
        yield heads.vocabulary[best.indices], best.values, said


def figures(
    heads: Heads, target: Target, answers: Sequence[Answer], nodes: int = 16
) -> tuple[list[list[float]], float]:
    """Accuracy on the target's greedy answers: for each depth the share of its tokens at rank 1, and among the first
    four; and the tokens that a step gains with trees of so many nodes, the target's own included."""
    hits, gained, places = torch.zeros(len(heads.heads), 2), 0, 0
    for proposed, probabilities, said in ranked(heads, target, answers):
        right = proposed == said[..., None]  # (M, depth, WIDEST)
        hits += torch.stack([right[..., :1].any(-1).sum(0), right.any(-1).sum(0)], -1).cpu()
        for own, at in zip(right.tolist(), probabilities.tolist(), strict=True):
            gained += 1 + accepted(own, tree(at, nodes))
        places += len(said)
    return (hits / max(1, places)).tolist(), gained / max(1, places)


def tree(probabilities: Sequence[Sequence[float]], nodes: int) -> set[tuple[int, ...]]:
    """Paths of ranks, the most probable `nodes` by the product of their heads' probabilities, at most WIDEST at a
    depth. A parent is never less probable than its child, and wins ties by being shorter."""
    paths: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for ranks in probabilities:
        wider = [(p * q, (*path, rank)) for (p, path), (rank, q) in itertools.product(level, enumerate(ranks))]
        level = sorted(wider, key=lambda path: -path[0])[:WIDEST]
        paths += level
    return {path for _, path in sorted(paths, key=lambda path: (-path[0], len(path[1])))[:nodes]}


def accepted(right: Sequence[Sequence[bool]], chosen: set[tuple[int, ...]]) -> int:
    """Tokens of the tree on the way that the target takes. right: depth x ranks."""
    path: tuple[int, ...] = ()
    for ranks in right:
        if not any(ranks) or (*path, ranks.index(True)) not in chosen:
            break
        path = (*path, ranks.index(True))
    return len(path)
