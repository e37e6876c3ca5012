"""A smaller model of the same vocabulary. Its cache holds committed tokens from a request's beginning alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider_runtime.loop.caches import Hole
from outrider_runtime.torch_engine.drafting import Ask, Finished, Ran
from outrider_runtime.torch_engine.drafts.beam import Beam
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.requests import Request
from outrider_runtime.torch_engine.runner import Model, Segment
from outrider_runtime.torch_engine.sampling import likeliest
from outrider_runtime.torch_engine.tree import Tree


class DraftModel:
    def __init__(self, model: Model, pool: KVPool) -> None:
        self.model = model
        self._pool = pool

    def close(self, holes: Sequence[tuple[Request, Hole]]) -> None:
        segments = [
            Segment(request.name, request.tokens[has : hole.end], has)
            for request, hole in holes
            if (has := self.model.cache.length(request.name)) < hole.end and self._grow(request, hole.end)
        ]
        if segments:
            self.model.run(segments, self._pool)

    def propose(self, step: Finished, ask: Ask) -> list[Tree]:
        """Whoever has a hole before the step's tokens is left out: over a hole it would propose junk."""
        ran, trees = step.ran, [Tree() for _ in step.ran]
        rows = [
            row for row, one in enumerate(ran)
            if self._is_whole(one) and self._grow(one.request, _end(one) + ask.nodes * ask.asks[row])
        ]  # fmt: skip
        if not rows:
            return trees
        logits = self._feed([ran[row] for row in rows])
        asking = [(row, place) for place, row in enumerate(rows) if ask.asks[row]]
        if ask.depth and asking:
            beam = Beam([ran[row].request for row, _ in asking], ask)
            self._extend(beam, logits[[place for _, place in asking]])
            for (row, _), tree in zip(asking, beam.trees, strict=True):
                trees[row] = tree
        return trees

    def forget(self, request: str) -> None:
        self.model.cache.forget(request)

    def _is_whole(self, one: Ran) -> bool:
        return self.model.cache.length(one.request.name) >= one.start

    def _grow(self, request: Request, tokens: int) -> bool:
        return self._pool.grow_or_drop(Holder(self.model.number, request.name), tokens)

    def _feed(self, ran: Sequence[Ran]) -> torch.Tensor:
        """Logits after each request's last committed token, (requests, vocabulary)."""
        segments = []
        for one in ran:
            has = self.model.cache.length(one.request.name)
            segments.append(Segment(one.request.name, one.request.tokens[has : _end(one)], has))
        hidden = self.model.run(segments, self._pool).last
        ends = torch.tensor([len(one.tokens) for one in segments]).cumsum(0) - 1
        return self.model.decoder.logits(hidden[ends.to(hidden.device)])

    def _extend(self, beam: Beam, logits: torch.Tensor) -> None:
        """A pass a depth. What the passes leave in the caches is forgotten: it may be rejected."""
        lengths = [self.model.cache.length(name) for name in beam.names]
        try:
            beam.grow(likeliest(logits, beam.rows(), beam.width))
            for _ in range(beam.depth - 1):
                logits = self.model.decoder.logits(self.model.run(beam.segments(lengths), self._pool).last)
                beam.grow(likeliest(logits, beam.rows(), beam.width))
        finally:
            for name, length in zip(beam.names, lengths, strict=True):
                self.model.cache[name].length = length


def _end(one: Ran) -> int:
    """Committed tokens: those that the target has computed, and in a request that is read the last drawn one."""
    return one.end + one.is_read
