"""Rounds of a training, the same for every kind of draft.

In each round the target answers a batch of prompts, and its hidden states are kept. Then the draft is trained for a few
steps on the answers kept.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import nn

from training.budget import Progress, say
from training.target import Answer, Target

SORTED = 8  # batches are drawn, sorted by length, and one is taken: prompts of like length need little padding
WARM_UP_STEPS, PEAK_RATE = 30, 0.6  # the peak learning rate is PEAK_RATE / hidden size
WINDOW_BYTES = 2 << 30  # of hidden states kept; the oldest answers leave first
VALIDATE_EVERY = 0.1  # share of the budget

Draft = TypeVar("Draft", bound=nn.Module)


@dataclass(frozen=True)
class Kind(Generic[Draft]):
    """A kind of draft, and its functions."""

    program: str
    """Its folder in `training`, which `python -m` runs."""
    name: str
    new: Callable[[Target, Sequence[Answer], int], Draft]
    """(target, answers, size of the draft vocabulary) -> a draft to train."""
    learn: Callable[[Target, Draft, torch.optim.Optimizer, Sequence[Answer], float], float]
    """(target, draft, optimizer, answers, learning rate) -> loss before the step that it makes."""
    figure: Callable[[Draft, Target, Sequence[Answer]], str]
    """(draft, target, answers) -> the line that drafts of this kind are compared by."""
    save: Callable[[Draft, Target, Path], None]
    load: Callable[[Path, Target], Draft]
    passes: int
    """Steps that train on an answer."""
    coolest: float = 1.0
    """Lowest temperature of sampled answers; the highest is 1."""


@dataclass(frozen=True)
class Work(Generic[Draft]):
    """Inputs of a training: prompts to answer (token ids), answers for validation, sizes, and the head's folder."""

    kind: Kind[Draft]
    prompts: Sequence[list[int]]
    invents: bool
    held_out: Sequence[Answer]
    output: Path
    batch: int
    length: int
    vocabulary: int


def train(target: Target, work: Work[Draft], progress: Progress, head: Draft | None = None) -> Draft | None:
    """Train in rounds until the budget is spent, or Ctrl-C or SIGTERM end it. The head is written along the way."""
    window: deque[Answer] = deque()
    optimizer, chooser, validated = None, random.Random(torch.initial_seed()), 0.0
    try:
        while progress.spent_share() < 1:
            if count := progress.room(work.batch):
                write_round(target, work, progress, window, chooser, count)
            if head is None:
                if not progress.knows_vocabulary():
                    continue
                head = work.kind.new(target, window, work.vocabulary)
            optimizer = optimizer or torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
            learn_round(target, work, progress, head, optimizer, window, chooser)
            if progress.spent_share() - validated >= VALIDATE_EVERY:
                validated = progress.spent_share()
                say(f"{validated:4.0%}  held out: {work.kind.figure(head, target, work.held_out)}")
                work.kind.save(head, target, work.output)
    except KeyboardInterrupt:
        say("interrupted: writing what there is" if head else "interrupted before there was a head: nothing is written")
    if head:
        work.kind.save(head, target, work.output)
    return head


def write_round(
    target: Target, work: Work[Draft], progress: Progress, window: deque[Answer], chooser: random.Random, count: int
) -> None:
    """Add a batch of sampled answers to the window; half of the prompts are the target's own if it invents them."""
    invented = [target.encode(text) for text in target.invent(count // 2 if work.invents else 0)]
    prompts = invented + draw_alike(work.prompts, count - len(invented), chooser)
    temperatures = work.kind.coolest + (1 - work.kind.coolest) * torch.rand(len(prompts), device=target.device)
    answers = target.write(prompts, work.length, temperatures, progress.tick)
    answers = [answer for answer in answers if len(answer.tokens) > 2]
    window.extend(answers)
    progress.answers += len(prompts)
    progress.tokens += sum(len(answer.tokens) - answer.prompt for answer in answers)
    while (
        len(window) > work.batch and sum(answer.fused.nbytes + answer.final.nbytes for answer in window) > WINDOW_BYTES
    ):
        window.popleft()


def draw_alike(prompts: Sequence[list[int]], count: int, chooser: random.Random) -> list[list[int]]:
    """Draw `count` prompts of like length; every prompt is equally likely."""
    drawn = sorted(chooser.choices(prompts, k=SORTED * count), key=len)
    start = count * chooser.randrange(SORTED)
    return drawn[start : start + count]


def learn_round(
    target: Target, work: Work[Draft], progress: Progress, head: Draft, optimizer: torch.optim.Optimizer,
    window: Sequence[Answer], chooser: random.Random,
) -> None:  # fmt: skip
    """Train on small batches from the window until the written answers are used up, at least as many as a round's."""
    size = max(1, work.batch // 4)
    end = max(progress.answers, progress.used + work.batch)
    while progress.used < end and (share := progress.spent_share()) < 1:
        rate = PEAK_RATE / target.config.hidden_size * min(1, (progress.steps + 1) / WARM_UP_STEPS) * (1 - share)
        loss = work.kind.learn(target, head, optimizer, chooser.sample(list(window), min(size, len(window))), rate)
        progress.steps += 1
        progress.used += size / work.kind.passes
        progress.loss = loss if math.isnan(progress.loss) else 0.9 * progress.loss + 0.1 * loss
        progress.tick()
