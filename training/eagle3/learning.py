"""Initialisation, training step and acceptance of an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from training.eagle3.head import Head
from training.target import Answer, Target

UNROLL = 4  # steps on the head's own output; the paper takes 7
STEP_WEIGHT = (
    0.8  # loss weight of a step / of the step before: a later token counts only if those before it were accepted
)
CLIP_NORM = 0.5
OTHER_STATES = 0.3  # weight of a random mix of all states, added to the deepest state, in a new head
FIRST_NORM = 0.3  # small: a new head must not be confident before it has learned


class Batch(NamedTuple):
    """Answers padded on the right to N positions.

    tokens, labelled (B, N + UNROLL + 2): the answer's tokens are labelled, those of the prompt and padding are not.
    fused (B, N, 3H), final (B, N + UNROLL + 2, H): the target's states, as in Answer.
    """

    tokens: Tensor
    labelled: Tensor
    fused: Tensor
    final: Tensor


def new_head(target: Target, answers: Sequence[Answer], size: int) -> Head:
    """Make a head to train, which reads mostly the deepest states, scaled, and has low confidence in every token.

    Raw states differ a hundredfold between dimensions and would hide the layer's output: each is divided by its size.
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
    """Draw the weights of every projection at a scale that keeps its input's; set biases to 0."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()


@torch.no_grad()
def begin_fusing(fc: nn.Linear, answers: Sequence[Answer]) -> None:
    """Let `fc` pass on the deepest state, with a little of a random mix of all that it reads."""
    states = [answer.fused[answer.prompt - 1 :, -fc.in_features :] for answer in answers]
    sizes = torch.cat(states).float().square().mean(0).sqrt().cpu()
    fc.weight[:, -fc.out_features :] += torch.eye(fc.out_features) / OTHER_STATES
    fc.weight.mul_(OTHER_STATES).div_(sizes.clamp_min(1e-3))


def draft_vocabulary(target: Target, answers: Sequence[Answer], size: int) -> Tensor:
    """Choose the tokens that the target expects most often in its answers."""
    expected = token_expectations(target, answers)
    return expected.topk(min(size, len(expected))).indices.sort().values


def token_expectations(target: Target, answers: Sequence[Answer]) -> Tensor:
    """Return (V,): sums of the target's probabilities of each token over its answers."""
    expected = torch.zeros(target.config.vocab_size, device=target.device)
    for answer in answers:
        expected += (answer.final[answer.prompt - 1 :] @ target.output.T).float().softmax(-1).sum(0)
    return expected


def collate(answers: Sequence[Answer]) -> Batch:
    """Make a batch. N is the longest answer - 2: the last position proposes the last token."""
    n = max(len(answer.tokens) for answer in answers) - 2
    places = torch.arange(n + UNROLL + 2)
    labelled = [(places >= answer.prompt) & (places < len(answer.tokens)) for answer in answers]
    return Batch(
        torch.stack([pad(answer.tokens, n + UNROLL + 2) for answer in answers]),
        torch.stack(labelled).to(answers[0].tokens.device),
        torch.stack([pad(answer.fused, n) for answer in answers]),
        torch.stack([pad(answer.final, n + UNROLL + 2) for answer in answers]),
    )


def pad(rows: Tensor, length: int) -> Tensor:
    """Return `length` rows: the first ones, or all of them and zeros."""
    missing = max(0, length - len(rows))
    return torch.cat([rows[:length], rows.new_zeros(missing, *rows.shape[1:])])


def compute_loss(head: Head, target: Target, batch: Batch) -> Tensor:
    """Return the weighted cross-entropy against the target's distribution over the draft vocabulary."""
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
    """Return the greedy acceptance rate of each position, given that those before were accepted, on greedy answers.

    An accepted proposal is the answer's token, so each step may read the answer's tokens.
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
    """Make one step; return the loss before it."""
    with torch.autocast(target.device, torch.bfloat16, enabled=halves_pay(target.device)):
        loss = compute_loss(head, target, batch)
    return step(head, optimizer, loss, rate)


def step(head: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> float:
    """Make one gradient step at a learning rate; return the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(head.parameters(), CLIP_NORM)
    optimizer.step()
    return float(loss.detach())
