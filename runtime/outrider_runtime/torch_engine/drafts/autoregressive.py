"""A drafter with a KV cache that runs over its own proposals: one forward pass for each depth of the tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider_runtime.torch_engine.drafting import CommittedStep, DraftTask, RequestStep, TorchDrafter
from outrider_runtime.torch_engine.drafts.beam import Beam
from outrider_runtime.torch_engine.kv import KVCache
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.model_runner import Segment
from outrider_runtime.torch_engine.token_sampling import Likeliest, Row
from outrider_runtime.torch_engine.tree import Tree


class Autoregressive(TorchDrafter, ABC):
    """Base of draft models and EAGLE heads. A token's state, (H,), is the input of the drafter's output layer."""

    layers: tuple[int, ...] = ()

    def __init__(self, number: int, cache: KVCache, pool: KVPool, weight_bytes: int) -> None:
        """number: the drafter's number in the KV pool."""
        self.weight_bytes = weight_bytes
        self.kv_bytes_per_token = cache.bytes_per_token
        self.number = number
        self.cache = cache
        self._pool = pool

    @torch.inference_mode()
    def propose(self, step: CommittedStep, task: DraftTask) -> list[Tree]:
        """Run over the committed tokens of every request that has room, then search beams for the requested ones."""
        trees = [Tree() for _ in step.request_steps]
        rows = [
            row
            for row, request_step in enumerate(step.request_steps)
            if self._has_room(request_step, task.nodes * task.is_requested[row])
        ]
        if not rows:
            return trees
        states = self._read([step.request_steps[row] for row in rows], step.layer_inputs)  # (len(rows), H)
        drafted = [(row, index) for index, row in enumerate(rows) if task.is_requested[row]]
        if task.depth and drafted:
            request_steps = [step.request_steps[row] for row, _ in drafted]
            beam = self._beam(request_steps, task, states[[index for _, index in drafted]])
            for (row, _), tree in zip(drafted, beam.trees, strict=True):
                trees[row] = tree
        return trees

    def forget(self, request: str) -> None:
        self.cache.forget(request)

    @abstractmethod
    def _entries(self, request_step: RequestStep) -> int | None:
        """Entries of the request's cache after `_read`; None: the drafter cannot propose for this request."""

    @abstractmethod
    def _read(self, request_steps: Sequence[RequestStep], layer_inputs: dict[int, Tensor]) -> Tensor:
        """Run over the committed tokens that the cache lacks; return each request's last state, (requests, H)."""

    @abstractmethod
    def _position(self, request_step: RequestStep) -> int:
        """Position of the first proposed token, as the drafter's rotations count."""

    @abstractmethod
    def _pass(self, segments: Sequence[Segment], states: Tensor) -> Tensor:
        """Run over the nodes of one depth; return their states, (R, H). states: (R, H), those of their parents."""

    @abstractmethod
    def _likeliest(self, states: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
        """Rank the target's tokens that may follow each state, (R, H)."""

    def _has_room(self, request_step: RequestStep, nodes: int) -> bool:
        entries = self._entries(request_step)
        return entries is not None and self._grow(request_step.request.name, entries + nodes)

    def _grow(self, request: str, entries: int) -> bool:
        return self._pool.grow_or_drop(Holder(self.number, request), entries)

    def _beam(self, request_steps: Sequence[RequestStep], task: DraftTask, states: Tensor) -> Beam:
        """Search a beam. The KV of its nodes is dropped afterwards, since the target may reject them."""
        beam = Beam([request_step.request for request_step in request_steps], task)
        positions = [self._position(request_step) for request_step in request_steps]
        lengths = [self.cache.length(name) for name in beam.names]
        try:
            beam.grow(self._likeliest(states, beam.rows(), task.width))
            for _ in range(task.depth - 1):
                states = self._pass(beam.segments(positions), states[beam.sources])  # (R, H)
                beam.grow(self._likeliest(states, beam.rows(), task.width))
        finally:
            for name, length in zip(beam.names, lengths, strict=True):
                self.cache[name].length = length
        return beam


def select_last(states: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Select the state of each segment's last token: (T, H) -> (segments, H)."""
    ends = torch.tensor([len(segment.tokens) for segment in segments]).cumsum(0) - 1
    return states[ends.to(states.device)]
