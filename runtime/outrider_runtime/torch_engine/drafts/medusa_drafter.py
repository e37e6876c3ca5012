"""Medusa heads that share the target's output layer: head k, from 1, reads the target's last state and proposes the
token k places behind the one that is drawn from it, without knowing those between (Cai et al. 2024, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider_runtime.drafters.medusa import HEADS
from outrider_runtime.model_config import config_file
from outrider_runtime.torch_engine.architecture import UnsupportedModelError, config_of
from outrider_runtime.torch_engine.drafting import CommittedStep, DraftTask, TorchDrafter
from outrider_runtime.torch_engine.drafts.beam import Beam
from outrider_runtime.torch_engine.linear import Linear
from outrider_runtime.torch_engine.model_runner import CachedModel
from outrider_runtime.torch_engine.token_sampling import Likeliest, Row, likeliest_among
from outrider_runtime.torch_engine.tree import Tree
from outrider_runtime.torch_engine.weights import in_vocabulary, read_weights


class MedusaHead(NamedTuple):
    """A residual block, and a matrix before the output layer; shapes in `Heads`."""

    block: Linear
    project: Linear

    def __call__(self, state: Tensor) -> Tensor:
        return self.project(state + functional.silu(self.block(state)))


class MedusaWeights:
    """The weights. Shapes: R rows, H width of the target, V' tokens that the heads may propose, V of the target."""

    def __init__(self, folder: Path, target: CachedModel) -> None:
        """Raises UnsupportedModelError, which names file and field."""
        config, file = config_of(folder), config_file(folder)
        weights, width = read_weights(folder, target.dtype, target.device), target.shape.width
        if config.get("hidden_size") != width:
            raise UnsupportedModelError(f"{file}: hidden_size is {config.get('hidden_size')}, the target's is {width}")
        self._decoder = target.decoder
        self._size, proposable = target.shape.vocabulary, config.get("draft_vocab_size")
        own = weights.take("vocabulary", proposable or self._size).long()
        self._vocabulary = in_vocabulary(own, self._size, folder, "vocabulary")
        self._heads = [
            MedusaHead(
                Linear(
                    weights.take(f"heads.{depth}.block.weight", width, width),
                    weights.take(f"heads.{depth}.block.bias", width),
                ).packed(),
                Linear(weights.take(f"heads.{depth}.project.weight", width, width)).packed(),
            )
            for depth in range(config.get(HEADS, 0))
        ]
        weights.expect_none_left()
        output = target.decoder.output.rows(self._vocabulary)
        self.weight_bytes = weights.taken_bytes + output.nbytes
        self._output = Linear(output).packed()

    def states(self, state: Tensor) -> list[Tensor]:
        """(R, H), as the target's last layer leaves it, to what the output layer reads at each depth, (R, H) each."""
        normed = self._decoder.normed(state)
        return [head(normed) for head in self._heads]

    def likeliest(self, state: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
        """(R, H), of one depth, to the target's tokens that its head proposes for each."""
        logits = self._output(state).float()
        return likeliest_among(logits, self._vocabulary, self._size, rows, width)


class MedusaDrafter(TorchDrafter):
    """A node's children are the next head's best tokens, whatever the node: the beam is the most probable part of the
    Cartesian product."""

    def __init__(self, folder: Path, target: CachedModel) -> None:
        self.head = MedusaWeights(folder, target)
        self.weight_bytes, self.kv_bytes_per_token = self.head.weight_bytes, 0
        self.layers: tuple[int, ...] = (target.shape.layers,)

    @torch.inference_mode()
    def propose(self, step: CommittedStep, ask: DraftTask) -> list[Tree]:
        trees = [Tree() for _ in step.ran]
        asking = [row for row, asks in enumerate(ask.asks) if asks]
        if not asking or not ask.depth:
            return trees
        ran = [step.ran[row] for row in asking]
        (layer,) = self.layers
        state = step.between[layer][[one.rows[-1] for one in ran]]
        beam = Beam([one.request for one in ran], ask)
        for own in self.head.states(state)[: ask.depth]:
            beam.grow(self.head.likeliest(own[beam.owners], beam.rows(), ask.width))
        for row, tree in zip(asking, beam.trees, strict=True):
            trees[row] = tree
        return trees
