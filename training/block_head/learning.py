"""How a block head starts, learns and is judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from training.block_head.head import BLOCK, MARKOV_RANK, READ, Attention, BlockHead, looks_back
from training.eagle3.learning import (
    FIRST_NORM,
    STEP_WEIGHT,
    begin_at_random,
    begin_fusing,
    halves_pay,
    padded,
    step,
    token_expectations,
)
from training.target import Answer, Target

STRETCH = 64
"""Successive blocks of each answer that a step trains on: their context is projected once."""
CONTEXT = 256
"""States before a stretch, at most."""
SAMPLED = 1024
"""Tokens that a step compares besides the head's own list, drawn from all others."""
BACK_PAIRS, BACK_STRENGTH, BACK_SHARPNESS = 6, 2.8, 1.5
"""A new head's attention looks at the tokens shortly before: rotary pairs of its biases, their size, and the norm's
weight. Steps that it would take to find these go into what it reads there."""
SMALLER = 0.5
"""Factor for random weights of queries and keys in a new head, so that the biases show."""


class Stretch(NamedTuple):
    """Blocks behind A successive tokens of B answers.

    tokens (B, A + BLOCK): from the first block's first token on. context (B, N, READ * H), unseen (B,): as the head
    takes them. final (B, A + BLOCK - 1, H): states that the target says the tokens after the first from.
    labelled (B, A + BLOCK - 1): which of those tokens are the answer's, not padding.
    """

    tokens: Tensor
    context: Tensor
    unseen: Tensor
    final: Tensor
    labelled: Tensor


def stretch_of(answer: Answer, first: int, blocks: int, context: int) -> Stretch:
    """One answer's (B = 1), from the token number `first` on, with so many states before it."""
    width, rows = answer.final.shape[1], context + blocks - 1
    unseen = max(0, context - first)
    states = answer.fused[max(0, first - context) : first + blocks - 1, -READ * width :]
    places = first + 1 + torch.arange(blocks + BLOCK - 1, device=states.device)
    return Stretch(
        padded(answer.tokens[first:], blocks + BLOCK)[None],
        padded(functional.pad(states, (0, 0, unseen, 0)), rows)[None],
        torch.tensor([unseen], device=states.device),
        padded(answer.final[first:], blocks + BLOCK - 1)[None],
        (places < len(answer.tokens))[None],
    )


def drawn_stretch(answer: Answer) -> Stretch:
    latest = len(answer.tokens) - 1 - STRETCH
    first = answer.prompt + int(torch.randint(max(1, latest - answer.prompt + 1), ()))
    return stretch_of(answer, first, STRETCH, CONTEXT)


def together(stretches: Sequence[Stretch]) -> Stretch:
    return Stretch(*(torch.cat(parts) for parts in zip(*stretches, strict=True)))


def new_head(target: Target, answers: Sequence[Answer], size: int) -> BlockHead:
    """A head to start from: it reads states of one scale, and looks at the tokens shortly before."""
    expected = token_expectations(target, answers)
    compared = expected.topk(min(size, len(expected))).indices.sort().values
    head = BlockHead(target.config, int(expected.argmin()), compared.cpu())
    begin_at_random(head)
    begin_fusing(head.fc, answers)
    with torch.no_grad():
        head.norm.weight.fill_(FIRST_NORM)
        head.markov_head.markov_w1.weight.copy_(_main_directions(target))
        head.markov_head.markov_w2.weight.zero_()
        for module in head.modules():
            if isinstance(module, Attention):
                _look_back(module)
    return head.to(target.device)


def _main_directions(target: Target) -> Tensor:
    """(V, MARKOV_RANK): where the embedding's rows differ most, of variance 1; tokens alike begin alike."""
    rows = target.embed(torch.arange(target.config.vocab_size, device=target.device)).float()
    centred = rows - rows.mean(0)
    directions: Tensor = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -MARKOV_RANK:]
    coordinates = centred @ directions
    normed: Tensor = functional.normalize(coordinates, dim=0) * len(coordinates) ** 0.5
    return normed


def _look_back(attention: Attention) -> None:
    """Query heads in turn prefer the token 1, 2, ... BLOCK places before."""
    size = attention.head_dim
    for project in (attention.q_proj, attention.k_proj):
        project.weight.mul_(SMALLER)
    for number in range(attention.q_proj.out_features // size):
        query, key = looks_back(size, 1 + number % BLOCK, min(BACK_PAIRS, size // 2))
        attention.q_proj.bias[number * size : (number + 1) * size] = BACK_STRENGTH * query
    attention.k_proj.bias.copy_(BACK_STRENGTH * key.repeat(attention.k_proj.out_features // size))
    attention.q_norm.weight.fill_(BACK_SHARPNESS)


class Compared(NamedTuple):
    """Tokens of a step (C,), and what to add to their logits (C,): a drawn one stands for all that were not."""

    tokens: Tensor
    addend: Tensor


def drawn_tokens(head: BlockHead, vocabulary: int) -> Compared:
    others = torch.ones(vocabulary, dtype=torch.bool, device=head.compared.device)
    others[head.compared] = False
    numbers = others.nonzero().flatten()
    drawn = numbers[torch.randperm(len(numbers), device=numbers.device)[:SAMPLED]]
    tokens = torch.cat([head.compared, drawn])
    addend = torch.zeros(len(tokens), device=tokens.device)
    addend[len(head.compared) :] = math.log(max(1, len(numbers)) / max(1, len(drawn)))
    return Compared(tokens, addend)


def loss_of(head: BlockHead, target: Target, stretch: Stretch, compared: Compared) -> Tensor:
    """Cross-entropy against the target's own distribution over the compared tokens, each place's in its weight.

    -sum p log q = logsumexp(l) - sum p l; as logits l are products with rows, sum p l is the product with the row that
    the target expects, which is one for all the blocks that propose the same token.
    """
    blocks = stretch.tokens.shape[1] - BLOCK
    rows, successors = target.output[compared.tokens], head.markov_head.markov_w2.weight[compared.tokens]
    with torch.no_grad():
        said = ((stretch.final @ rows.T).float() + compared.addend).softmax(-1)  # (B, A + BLOCK - 1, C)
        expected = said.to(rows.dtype) @ rows  # (B, A + BLOCK - 1, H)
    states = head(target.embed, stretch.tokens[:, :blocks], stretch.context, stretch.unseen)
    before = head.markov_head.markov_w1(stretch.tokens[:, :-1])  # (B, A + BLOCK - 1, R)
    addends = before @ successors.T + compared.addend  # (B, A + BLOCK - 1, C)
    likely = (before * (said @ successors)).sum(-1) + said @ compared.addend  # (B, A + BLOCK - 1)
    total = torch.zeros((), device=target.device)
    for place in range(BLOCK):
        at = slice(place, place + blocks)
        labelled, own = stretch.labelled[:, at], states[:, :, place]
        logits = (own[labelled].to(rows.dtype) @ rows.T).float() + addends[:, at][labelled]  # (M, C)
        agreed = (own * expected[:, at]).sum(-1)[labelled] + likely[:, at][labelled]
        total = total + STEP_WEIGHT**place * (logits.logsumexp(-1) - agreed.float()).sum() / labelled.sum().clamp_min(1)
    return total / sum(STEP_WEIGHT**place for place in range(BLOCK))


def learn(
    target: Target, head: BlockHead, optimizer: torch.optim.Optimizer, answers: Sequence[Answer], rate: float
) -> float:
    """One step; the loss before it."""
    stretch = together([drawn_stretch(answer) for answer in answers])
    with torch.autocast(target.device, torch.bfloat16, enabled=halves_pay(target.device)):
        loss = loss_of(head, target, stretch, drawn_tokens(head, target.config.vocab_size))
    return step(head, optimizer, loss, rate)


@torch.no_grad()
def acceptance(head: BlockHead, target: Target, answers: Sequence[Answer]) -> list[float]:
    """Greedy acceptance of each place, given that those before it were accepted, on the target's greedy answers.

    A proposal that was accepted is the answer's own token, so the token before each is the answer's.
    """
    tried, accepted = [0] * BLOCK, [0] * BLOCK
    for answer in answers:
        blocks = len(answer.tokens) - 1 - answer.prompt
        stretch = stretch_of(answer, answer.prompt, blocks, answer.prompt)
        states = head(target.embed, stretch.tokens[:, :blocks], stretch.context, stretch.unseen)[0]
        alive = torch.arange(blocks, device=states.device)
        for place in range(BLOCK):
            alive = alive[stretch.labelled[0, alive + place]]
            tokens = stretch.tokens[0, alive + place]
            logits = (states[alive, place].to(target.output.dtype) @ target.output.T).float() + head.markov(tokens)
            tried[place] += len(alive)
            alive = alive[logits.argmax(-1) == stretch.tokens[0, alive + place + 1]]
            accepted[place] += len(alive)
    return [hit / trial if trial else 0.0 for hit, trial in zip(accepted, tried, strict=True)]
