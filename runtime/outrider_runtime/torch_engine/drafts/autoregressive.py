"""A drafter with a cache, which runs over its own proposals: a pass a depth."""

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
    """Its state of a token, (H,), is what its output layer reads."""

    layers: tuple[int, ...] = ()

    def __init__(self, number: int, cache: KVCache, pool: KVPool, weight_bytes: int) -> None:
        """number: its place among the models of the pool."""
        self.weight_bytes, self.kv_bytes_per_token = weight_bytes, cache.bytes_per_token
        self.number = number
        self.cache = cache
        self._pool = pool

    @torch.inference_mode()
    def propose(self, step: CommittedStep, ask: DraftTask) -> list[Tree]:
        trees = [Tree() for _ in step.ran]
        rows = [row for row, one in enumerate(step.ran) if self._has_room(one, ask.nodes * ask.asks[row])]
        if not rows:
            return trees
        states = self._read([step.ran[row] for row in rows], step.between)
        asking = [(row, place) for place, row in enumerate(rows) if ask.asks[row]]
        if ask.depth and asking:
            beam = self._beam([step.ran[row] for row, _ in asking], ask, states[[place for _, place in asking]])
            for (row, _), tree in zip(asking, beam.trees, strict=True):
                trees[row] = tree
        return trees

    def forget(self, request: str) -> None:
        self.cache.forget(request)

    @abstractmethod
    def _entries(self, one: RequestStep) -> int | None:
        """Of its cache, once it has read the step's committed tokens; None: it cannot propose for this request."""

    @abstractmethod
    def _read(self, ran: Sequence[RequestStep], between: dict[int, Tensor]) -> Tensor:
        """Run over the committed tokens that it lacks; the last state of each request, (requests, H)."""

    @abstractmethod
    def _position(self, one: RequestStep) -> int:
        """Of a request's first node."""

    @abstractmethod
    def _pass(self, segments: Sequence[Segment], states: Tensor) -> Tensor:
        """Over the nodes of a depth, (R, H); states: of their parents, (R, H)."""

    @abstractmethod
    def _likeliest(self, states: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
        """(R, H) to the target's tokens that come behind each."""

    def _has_room(self, one: RequestStep, nodes: int) -> bool:
        entries = self._entries(one)
        return entries is not None and self._grow(one.request.name, entries + nodes)

    def _grow(self, request: str, entries: int) -> bool:
        return self._pool.grow_or_drop(Holder(self.number, request), entries)

    def _beam(self, ran: Sequence[RequestStep], ask: DraftTask, states: Tensor) -> Beam:
        """What its passes leave in the cache is forgotten: it may be rejected."""
        beam, positions = Beam([one.request for one in ran], ask), [self._position(one) for one in ran]
        lengths = [self.cache.length(name) for name in beam.names]
        try:
            beam.grow(self._likeliest(states, beam.rows(), ask.width))
            for _ in range(ask.depth - 1):
                states = self._pass(beam.segments(positions), states[beam.sources])
                beam.grow(self._likeliest(states, beam.rows(), ask.width))
        finally:
            for name, length in zip(beam.names, lengths, strict=True):
                self.cache[name].length = length
        return beam


def last_of(states: Tensor, segments: Sequence[Segment]) -> Tensor:
    """(T, H) to the last of each segment's, (segments, H)."""
    ends = torch.tensor([len(one.tokens) for one in segments]).cumsum(0) - 1
    return states[ends.to(states.device)]
