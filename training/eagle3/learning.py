"""How a head starts, learns and is judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from training.eagle3.head import Head
from training.target import Answer, Target

UNROLL = 4  # steps on the head's own output; the paper takes 7
STEP_WEIGHT = 0.8  # of each step's loss against the one before: a later token counts only if those before it did
CLIP_NORM = 0.5
OTHER_STATES = 0.3  # weight of a random mix of all states, added to the deepest one, in a new head
FIRST_NORM = 0.3  # small: a new head that is sure of what it does not know unlearns that first


class Batch(NamedTuple):
    """Answers padded on the right to N positions.

    tokens, labelled (B, N + UNROLL + 2): a token is labelled where it is the answer's, not the prompt's, not padding.
    fused (B, N, 3H), final (B, N + UNROLL + 2, H): the target's states, as in Answer.
    """

    tokens: Tensor
    labelled: Tensor
    fused: Tensor
    final: Tensor


def new_head(target: Target, answers: Sequence[Answer], size: int) -> Head:
    """A head to start from: it reads states of one scale, mostly the deepest, and is unsure of everything.

    Raw states differ a hundredfold between dimensions, and drown what the layer adds: each is divided by its own size.
    """
    head = Head(target.config, draft_vocabulary(target, answers, size))
    begin_at_random(head)
    begin_fusing(head.fc, answers)
    with torch.no_grad():
        head.norm.weight.fill_(FIRST_NORM)
        head.lm_head.weight.copy_(target.output[head.vocabulary])
    return head.to(target.device)


@torch.no_grad()
def begin_at_random(head: nn.Module) -> None:
    """Weights of every projection at a scale that keeps that of what they read; biases at 0."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()


@torch.no_grad()
def begin_fusing(fc: nn.Linear, answers: Sequence[Answer]) -> None:
    """Reads the deepest of the answers' states, and some of a random mix of as many as `fc` takes."""
    states = [answer.fused[answer.prompt - 1 :, -fc.in_features :] for answer in answers]
    sizes = torch.cat(states).float().square().mean(0).sqrt().cpu()
    fc.weight[:, -fc.out_features :] += torch.eye(fc.out_features) / OTHER_STATES
    fc.weight.mul_(OTHER_STATES).div_(sizes.clamp_min(1e-3))


def draft_vocabulary(target: Target, answers: Sequence[Answer], size: int) -> Tensor:
    """The tokens that the target expects most often in its answers."""
    expected = token_expectations(target, answers)
    return expected.topk(min(size, len(expected))).indices.sort().values


def token_expectations(target: Target, answers: Sequence[Answer]) -> Tensor:
    """(V,): how often the target expects each token in its answers; sums of its probabilities, not counts."""
    expected = torch.zeros(target.config.vocab_size, device=target.device)
    for answer in answers:
        expected += (answer.final[answer.prompt - 1 :] @ target.output.T).float().softmax(-1).sum(0)
    return expected


def collate(answers: Sequence[Answer]) -> Batch:
    """N is two less than the longest answer: the last position proposes the last token."""
    n = max(len(answer.tokens) for answer in answers) - 2
    places = torch.arange(n + UNROLL + 2)
    labelled = [(places >= answer.prompt) & (places < len(answer.tokens)) for answer in answers]
    return Batch(
        torch.stack([padded(answer.tokens, n + UNROLL + 2) for answer in answers]),
        torch.stack(labelled).to(answers[0].tokens.device),
        torch.stack([padded(answer.fused, n) for answer in answers]),
        torch.stack([padded(answer.final, n + UNROLL + 2) for answer in answers]),
    )


def padded(rows: Tensor, length: int) -> Tensor:
    """The first `length` rows, or zeros after them."""
    missing = max(0, length - len(rows))
    return torch.cat([rows[:length], rows.new_zeros(missing, *rows.shape[1:])])


def loss_of(head: Head, target: Target, batch: Batch) -> Tensor:
    """Cross-entropy against the target's own distribution over the draft vocabulary, each step's in its weight."""
    n, total = batch.fused.shape[1], torch.zeros((), device=target.device)
    after = batch.labelled[:, 1:]  # (B, N + UNROLL + 1): positions whose next token is labelled
    with torch.no_grad():
        rows = target.output[head.vocabulary]
        target_probabilities = (batch.final[:, :-1][after] @ rows.T).float().softmax(-1)  # (all of them, draft V)
    for step, states in enumerate(head.unroll(target.embed, batch.tokens, batch.fused, UNROLL)):
        seen = torch.zeros_like(after)
        seen[:, 1 + step : 1 + step + n] = True
        proposed = head.lm_head(states[after[:, 1 + step : 1 + step + n]]).float().log_softmax(-1)  # (M, draft V)
        total = total - STEP_WEIGHT**step * (target_probabilities[seen[after]] * proposed).sum() / max(1, len(proposed))
    return total / sum(STEP_WEIGHT**step for step in range(UNROLL))


@torch.no_grad()
def acceptance(head: Head, target: Target, answers: Sequence[Answer]) -> list[float]:
    """Greedy acceptance of each position, given that those before it were accepted, on the target's greedy answers.

    A proposal that was accepted is the answer's own token, so that reading the answer's tokens is drafting.
    """
    tried, accepted = [0] * UNROLL, [0] * UNROLL
    for start in range(0, len(answers), 8):
        batch = collate(answers[start : start + 8])
        n, alive = batch.fused.shape[1], torch.ones_like(batch.labelled[:, : batch.fused.shape[1]])
        for step, states in enumerate(head.unroll(target.embed, batch.tokens, batch.fused, UNROLL)):
            alive = alive & batch.labelled[:, 2 + step : 2 + step + n]
            tried[step] += int(alive.sum())
            proposed = head.vocabulary[head.lm_head(states).argmax(-1)]
            alive = alive & (proposed == batch.tokens[:, 2 + step : 2 + step + n])
            accepted[step] += int(alive.sum())
    return [hit / trial if trial else 0.0 for hit, trial in zip(accepted, tried, strict=True)]


def halves_pay(device: str) -> bool:
    """Whether half precision is faster: on a GPU, and on a CPU that computes in it."""
    able = torch.cpu.get_capabilities()
    return device == "cuda" or bool(able.get("avx512_bf16") or able.get("amx_bf16") or able.get("sve_bf16"))


def learn(target: Target, head: Head, optimizer: torch.optim.Optimizer, batch: Batch, rate: float) -> float:
    """One step; the loss before it."""
    with torch.autocast(target.device, torch.bfloat16, enabled=halves_pay(target.device)):
        loss = loss_of(head, target, batch)
    return step(head, optimizer, loss, rate)


def step(head: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> float:
    """Moves the head down the gradient of `loss`, at a learning rate; the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(head.parameters(), CLIP_NORM)
    optimizer.step()
    return float(loss.detach())
