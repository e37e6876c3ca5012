"""Initialisation, training step and figures of Medusa heads."""

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
"""Loss weight of a depth / of the depth before: a later token counts only if those before it were accepted."""
STRETCH = 64
"""Positions of each answer that a step trains on: many small steps train better than few large ones."""
WIDEST = 4
"""Most nodes of the engine's trees at a depth, hence the ranks of a head that may count."""
RIDGE = 0.01
"""Ridge of the first guess, as a share of the states' mean square: it pulls the guess towards the identity."""


def new_heads(target: Target, answers: Sequence[Answer], size: int) -> Heads:
    """Make heads that begin with the best linear guess of the state so many tokens later (ridge regression)."""
    heads = Heads(target.config.hidden_size, DEPTH, draft_vocabulary(target, answers, size)).to(target.device)
    states = answer_states(answers)
    for depth, head in enumerate(heads.heads, 1):
        before, after = torch.cat([state[:-depth] for state in states]), torch.cat([state[depth:] for state in states])
        assert isinstance(head, Head)
        head.begin(linear_guess(before, after))
    return heads


def answer_states(answers: Sequence[Answer]) -> list[Tensor]:
    """Return the states (M, H) of each answer, from the one that its first token is drawn from on."""
    return [answer.final[answer.prompt - 1 :].float() for answer in answers]


def linear_guess(before: Tensor, after: Tensor) -> Tensor:
    """Return the matrix (H, H) that maps states (M, H) closest to those after them."""
    squares = before.T @ before
    ridge = RIDGE * squares.diagonal().mean().clamp_min(1e-6) * torch.eye(len(squares), device=before.device)
    guess: Tensor = torch.linalg.solve(squares + ridge, before.T @ after + ridge)
    return guess.T


def stretch(states: Tensor) -> Tensor:
    """Draw a stretch of an answer's states: at most STRETCH, and DEPTH more, which the heads predict."""
    length = STRETCH + DEPTH
    begin = int(torch.randint(max(1, len(states) - length + 1), ()))
    return states[begin : begin + length]


def compute_loss(heads: Heads, target: Target, states: Sequence[Tensor]) -> Tensor:
    """Return the weighted cross-entropy against the target's distribution over the draft vocabulary.

    states: (M, H) of each answer. Logits are products with rows of the output layer, so their mean under the target's
    distribution is the product with the mean row.
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
    """Make one step; return the loss before it."""
    with torch.autocast(target.device, torch.bfloat16, enabled=halves_pay(target.device)):
        loss = compute_loss(heads, target, [stretch(states) for states in answer_states(answers)])
    return step(heads, optimizer, loss, rate)


@torch.no_grad()
def rank_proposals(heads: Heads, target: Target, answers: Sequence[Answer]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each answer's proposals (M, depth, WIDEST), the most probable first, their probabilities, and the target's
    tokens there (M, depth). M: places with `depth` tokens after them."""
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
    """Return the accuracy on greedy answers, and the tokens per step with trees of `nodes` nodes, bonus token included.

    The accuracy of a depth is the share of its tokens at rank 1, and among the first four.
    """
    hits, gained, places = torch.zeros(len(heads.heads), 2), 0, 0
    for proposed, probabilities, said in rank_proposals(heads, target, answers):
        right = proposed == said[..., None]  # (M, depth, WIDEST)
        hits += torch.stack([right[..., :1].any(-1).sum(0), right.any(-1).sum(0)], -1).cpu()
        for own, at in zip(right.tolist(), probabilities.tolist(), strict=True):
            gained += 1 + count_accepted(own, tree(at, nodes))
        places += len(said)
    return (hits / max(1, places)).tolist(), gained / max(1, places)


def tree(probabilities: Sequence[Sequence[float]], nodes: int) -> set[tuple[int, ...]]:
    """Return the `nodes` most probable paths of ranks by the product of their heads' probabilities, at most WIDEST at
    a depth. A parent is at least as probable as its child, and wins a tie since it is shorter."""
    paths: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for ranks in probabilities:
        wider = [(p * q, (*path, rank)) for (p, path), (rank, q) in itertools.product(level, enumerate(ranks))]
        level = sorted(wider, key=lambda path: -path[0])[:WIDEST]
        paths += level
    return {path for _, path in sorted(paths, key=lambda path: (-path[0], len(path[1])))[:nodes]}


def count_accepted(right: Sequence[Sequence[bool]], chosen: set[tuple[int, ...]]) -> int:
    """Count the tokens of the tree on the target's path. right: depth x ranks."""
    path: tuple[int, ...] = ()
    for ranks in right:
        if not any(ranks) or (*path, ranks.index(True)) not in chosen:
            break
        path = (*path, ranks.index(True))
    return len(path)
