"""Initialisation, training step and acceptance of a block head."""

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
    pad,
    step,
    token_expectations,
)
from training.target import Answer, Target

STRETCH = 64
"""Successive blocks of each answer that a step trains on: their context is projected once."""
CONTEXT = 256
"""Most states before a stretch."""
SAMPLED = 1024
"""Tokens that a step compares in addition to the head's list, drawn from all others."""
BACK_PAIRS, BACK_STRENGTH, BACK_SHARPNESS = 6, 2.8, 1.5
"""Rotary pairs of a new head's biases, their size, and the norm's weight. With them its attention starts on the tokens
shortly before; training need not find that."""
SMALLER = 0.5
"""Factor for random weights of queries and keys in a new head, so that the biases outweigh them."""


class Stretch(NamedTuple):
    """Blocks after A successive tokens of B answers.

    tokens (B, A + BLOCK): from the first block's first token on. context (B, N, READ * H), unseen (B,): inputs of the
    head. final (B, A + BLOCK - 1, H): the target's states that predict the tokens after the first.
    labelled (B, A + BLOCK - 1): which of those tokens are the answer's, not padding.
    """

    tokens: Tensor
    context: Tensor
    unseen: Tensor
    final: Tensor
    labelled: Tensor


def cut_stretch(answer: Answer, first: int, blocks: int, context: int) -> Stretch:
    """Cut the stretch of one answer (B = 1) from token `first` on. context: states before it."""
    width, rows = answer.final.shape[1], context + blocks - 1
    unseen = max(0, context - first)
    states = answer.fused[max(0, first - context) : first + blocks - 1, -READ * width :]
    places = first + 1 + torch.arange(blocks + BLOCK - 1, device=states.device)
    return Stretch(
        pad(answer.tokens[first:], blocks + BLOCK)[None],
        pad(functional.pad(states, (0, 0, unseen, 0)), rows)[None],
        torch.tensor([unseen], device=states.device),
        pad(answer.final[first:], blocks + BLOCK - 1)[None],
        (places < len(answer.tokens))[None],
    )


def draw_stretch(answer: Answer) -> Stretch:
    latest = len(answer.tokens) - 1 - STRETCH
    first = answer.prompt + int(torch.randint(max(1, latest - answer.prompt + 1), ()))
    return cut_stretch(answer, first, STRETCH, CONTEXT)


def join_stretches(stretches: Sequence[Stretch]) -> Stretch:
    return Stretch(*(torch.cat(parts) for parts in zip(*stretches, strict=True)))


def new_head(target: Target, answers: Sequence[Answer], size: int) -> BlockHead:
    """Make a head to train: the states that it reads have one scale, and it attends to the tokens shortly before."""
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
    """Return (V, MARKOV_RANK): principal components of the embedding, so that similar tokens begin similar."""
    rows = target.embed(torch.arange(target.config.vocab_size, device=target.device)).float()
    centred = rows - rows.mean(0)
    directions: Tensor = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -MARKOV_RANK:]
    coordinates = centred @ directions
    normed: Tensor = functional.normalize(coordinates, dim=0) * len(coordinates) ** 0.5
    return normed


def _look_back(attention: Attention) -> None:
    """Let the query heads in turn prefer the token 1, 2, ... BLOCK places before."""
    size = attention.head_dim
    for project in (attention.q_proj, attention.k_proj):
        project.weight.mul_(SMALLER)
    for number in range(attention.q_proj.out_features // size):
        query, key = looks_back(size, 1 + number % BLOCK, min(BACK_PAIRS, size // 2))
        attention.q_proj.bias[number * size : (number + 1) * size] = BACK_STRENGTH * query
    attention.k_proj.bias.copy_(BACK_STRENGTH * key.repeat(attention.k_proj.out_features // size))
    attention.q_norm.weight.fill_(BACK_SHARPNESS)


class Compared(NamedTuple):
    """Tokens of a step (C,), and addends to their logits (C,): drawn tokens stand for those not drawn."""

    tokens: Tensor
    addend: Tensor


def draw_compared(head: BlockHead, vocabulary: int) -> Compared:
    others = torch.ones(vocabulary, dtype=torch.bool, device=head.compared.device)
    others[head.compared] = False
    numbers = others.nonzero().flatten()
    drawn = numbers[torch.randperm(len(numbers), device=numbers.device)[:SAMPLED]]
    tokens = torch.cat([head.compared, drawn])
    addend = torch.zeros(len(tokens), device=tokens.device)
    addend[len(head.compared) :] = math.log(max(1, len(numbers)) / max(1, len(drawn)))
    return Compared(tokens, addend)


def compute_loss(head: BlockHead, target: Target, stretch: Stretch, compared: Compared) -> Tensor:
    """Return the weighted cross-entropy against the target's distribution over the compared tokens.

    -sum p log q = logsumexp(l) - sum p l. Logits l are products with rows of the output layer, so sum p l is the
    product with the mean row under p, which is shared by all blocks that propose the same token.
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
    """Make one step; return the loss before it."""
    stretch = join_stretches([draw_stretch(answer) for answer in answers])
    with torch.autocast(target.device, torch.bfloat16, enabled=halves_pay(target.device)):
        loss = compute_loss(head, target, stretch, draw_compared(head, target.config.vocab_size))
    return step(head, optimizer, loss, rate)


@torch.no_grad()
def acceptance(head: BlockHead, target: Target, answers: Sequence[Answer]) -> list[float]:
    """Return the greedy acceptance rate of each place, given that those before were accepted, on greedy answers.

    An accepted proposal is the answer's token, so the token before each place is the answer's.
    """
    tried, accepted = [0] * BLOCK, [0] * BLOCK
    for answer in answers:
        blocks = len(answer.tokens) - 1 - answer.prompt
        stretch = cut_stretch(answer, answer.prompt, blocks, answer.prompt)
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
