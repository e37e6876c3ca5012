"""Medusa heads that share the target's output layer (Cai et al. 2024, section 3.1).

Head k = 1, 2, ... reads the target's last hidden state. It proposes the token k positions after the one that is drawn
from that state, without knowing the tokens between.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider_runtime.drafters.medusa import HEADS
from outrider_runtime.model_config import config_file
from outrider_runtime.torch_engine.architecture import UnsupportedModelError, read_unchecked_config
from outrider_runtime.torch_engine.drafting import CommittedStep, DraftTask, TorchDrafter
from outrider_runtime.torch_engine.drafts.beam import Beam
from outrider_runtime.torch_engine.linear import Linear
from outrider_runtime.torch_engine.model_runner import CachedModel
from outrider_runtime.torch_engine.token_sampling import Likeliest, Row, likeliest_among
from outrider_runtime.torch_engine.tree import Tree
from outrider_runtime.torch_engine.weights import in_vocabulary, read_weights


class MedusaHead(NamedTuple):
    """One head: a residual block, then a projection to the input of the output layer; (R, H) -> (R, H)."""

    block: Linear
    project: Linear

    def __call__(self, state: Tensor) -> Tensor:
        return self.project(state + functional.silu(self.block(state)))


class MedusaWeights:
    """The tensors of all heads.

    Shapes: R rows, H hidden size, V tokens of the target's vocabulary, V' that the heads may propose.
    """

    def __init__(self, folder: Path, target: CachedModel) -> None:
        """Read the heads' folder. Raises UnsupportedModelError, which names file and field."""
        config, file = read_unchecked_config(folder), config_file(folder)
        weights, width = read_weights(folder, target.dtype, target.device), target.shape.width
        if config.get("hidden_size") != width:
            raise UnsupportedModelError(
                f"{file}: hidden_size is {config.get('hidden_size')}, but the target's is {width}"
            )
        self._decoder = target.decoder
        self._size, proposable = target.shape.vocabulary, config.get("draft_vocab_size")
        vocabulary = weights.take("vocabulary", proposable or self._size).long()
        self._vocabulary = in_vocabulary(vocabulary, self._size, folder, "vocabulary")
        self._heads = [
            MedusaHead(
                Linear(
                    weights.take(f"heads.{depth}.block.weight", width, width),
                    weights.take(f"heads.{depth}.block.bias", width),
                ).pack(),
                Linear(weights.take(f"heads.{depth}.project.weight", width, width)).pack(),
            )
            for depth in range(config.get(HEADS, 0))
        ]
        weights.expect_none_left()
        output = target.decoder.output.rows(self._vocabulary)
        self.weight_bytes = weights.taken_bytes + output.nbytes
        self._output = Linear(output).pack()

    def states(self, state: Tensor) -> list[Tensor]:
        """Run each head over the last layer's output, (R, H); return one (R, H) for each depth."""
        normed = self._decoder.normalise(state)
        return [head(normed) for head in self._heads]

    def likeliest(self, state: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
        """Rank the target's tokens for one depth. state: (R, H), that depth's head's output for each node."""
        logits = self._output(state).float()
        return likeliest_among(logits, self._vocabulary, self._size, rows, width)


class MedusaDrafter(TorchDrafter):
    """Proposes with Medusa heads. Every node of a depth has the same candidates, those of the depth's head, so the beam
    is the most probable part of the heads' Cartesian product."""

    def __init__(self, folder: Path, target: CachedModel) -> None:
        self.weights = MedusaWeights(folder, target)
        self.weight_bytes, self.kv_bytes_per_token = self.weights.weight_bytes, 0
        self.layers: tuple[int, ...] = (target.shape.layers,)

    @torch.inference_mode()
    def propose(self, step: CommittedStep, task: DraftTask) -> list[Tree]:
        trees = [Tree() for _ in step.request_steps]
        drafted = [row for row, is_requested in enumerate(task.is_requested) if is_requested]
        if not drafted or not task.depth:
            return trees
        request_steps = [step.request_steps[row] for row in drafted]
        (layer,) = self.layers
        state = step.layer_inputs[layer][[request_step.rows[-1] for request_step in request_steps]]  # (len(drafted), H)
        beam = Beam([request_step.request for request_step in request_steps], task)
        for head_output in self.weights.states(state)[: task.depth]:  # (len(drafted), H)
            beam.grow(self.weights.likeliest(head_output[beam.owners], beam.rows(), task.width))
        for row, tree in zip(drafted, beam.trees, strict=True):
            trees[row] = tree
        return trees
