"""A smaller model of the same vocabulary. Its cache holds committed tokens from a request's beginning alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider_runtime.loop.caches import Hole
from outrider_runtime.torch_engine.drafting import Finished, Ran
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.requests import Request
from outrider_runtime.torch_engine.runner import Model, Segment
from outrider_runtime.torch_engine.sampling import draw, row_of


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

    def propose(self, step: Finished, asks: Sequence[bool], most: int) -> list[list[int]]:
        """Whoever has a hole before the step's tokens is left out: over a hole it would propose junk."""
        ran, proposals = step.ran, [list[int]() for _ in step.ran]
        rows = [row for row, one in enumerate(ran) if self._is_whole(one) and self._grow(one.request, _end(one) + most)]
        if not rows:
            return proposals
        logits = self._feed([ran[row] for row in rows])
        asking = [(row, place) for place, row in enumerate(rows) if asks[row]]
        if most and asking:
            made = self._extend([ran[row].request for row, _ in asking], logits[[place for _, place in asking]], most)
            for (row, _), own in zip(asking, made, strict=True):
                proposals[row] = own
        return proposals

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

    def _extend(self, requests: Sequence[Request], logits: torch.Tensor, most: int) -> list[list[int]]:
        """A pass a token. What the passes leave in the caches is forgotten: it may be rejected."""
        lengths = [self.model.cache.length(one.name) for one in requests]
        made = [[token] for token in draw(logits, [row_of(one, ()) for one in requests])]
        try:
            for depth in range(most - 1):
                segments = [
                    Segment(one.name, own[-1:], length + depth)
                    for one, own, length in zip(requests, made, lengths, strict=True)
                ]
                logits = self.model.decoder.logits(self.model.run(segments, self._pool).last)
                tokens = draw(logits, [row_of(one, own) for one, own in zip(requests, made, strict=True)])
                for own, token in zip(made, tokens, strict=True):
                    own.append(token)
        finally:
            for one, length in zip(requests, lengths, strict=True):
                self.model.cache[one.name].length = length
        return made


def _end(one: Ran) -> int:
    """Committed tokens: those that the target has computed, and in a request that is read the last drawn one."""
    return one.start + one.kept + one.is_read
