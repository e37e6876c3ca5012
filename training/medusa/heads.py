"""Medusa heads (Cai et al. 2024, section 3.1) that share the target's output layer: W2 is that layer times a matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Head(nn.Module):
    """The head of one depth: predicts the input of the target's output layer so many tokens later."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Linear(width, width)
        self.project = nn.Linear(width, width, bias=False)
        self.begin(torch.eye(width))

    @torch.no_grad()
    def begin(self, project: Tensor) -> None:
        """Set the initial weights. project: (H, H); the identity proposes the target's next token again."""
        self.block.weight.zero_()
        self.block.bias.zero_()
        self.project.weight.copy_(project)

    def forward(self, state: Tensor) -> Tensor:
        """Map states (..., H) to states (..., H)."""
        out: Tensor = self.project(state + functional.silu(self.block(state)))
        return out


class Heads(nn.Module):
    """Head k, from 1, reads the state that the next token was drawn from, and proposes the token k places after it."""

    def __init__(self, width: int, depth: int, vocabulary: Tensor) -> None:
        """vocabulary (V',): the tokens that they may propose."""
        super().__init__()
        self.heads = nn.ModuleList(Head(width) for _ in range(depth))
        self.vocabulary: Tensor
        self.register_buffer("vocabulary", vocabulary)

    def forward(self, state: Tensor) -> list[Tensor]:
        """Return the states (..., H) of each depth, inputs of the output layer."""
        return [head(state) for head in self.heads]
