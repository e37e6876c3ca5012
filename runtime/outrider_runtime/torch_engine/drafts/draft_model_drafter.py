"""A smaller model of the same vocabulary. Its cache holds committed tokens from a request's beginning alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider_runtime.loop.caches import Hole
from outrider_runtime.torch_engine.drafting import RequestStep
from outrider_runtime.torch_engine.drafts.autoregressive import Autoregressive, last_of
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.kv_pool import KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel, Segment
from outrider_runtime.torch_engine.token_sampling import Likeliest, Row, likeliest


class DraftModelDrafter(Autoregressive):
    def __init__(self, model: CachedModel, pool: KVPool) -> None:
        super().__init__(model.number, model.cache, pool, model.weight_bytes)
        self.model = model

    def close(self, holes: Sequence[tuple[Request, Hole]]) -> None:
        segments = [
            Segment(request.name, request.tokens[has : hole.end], has)
            for request, hole in holes
            if (has := self.cache.length(request.name)) < hole.end and self._grow(request.name, hole.end)
        ]
        if segments:
            self.model.run(segments, self._pool)

    def _entries(self, one: RequestStep) -> int | None:
        """Over a hole before the step's tokens it would propose junk."""
        return self._position(one) if self.cache.length(one.request.name) >= one.start else None

    def _read(self, ran: Sequence[RequestStep], _between: dict[int, Tensor]) -> Tensor:
        segments = []
        for one in ran:
            has = self.cache.length(one.request.name)
            segments.append(Segment(one.request.name, one.request.tokens[has : self._position(one)], has))
        return last_of(self.model.run(segments, self._pool).last, segments)

    def _position(self, one: RequestStep) -> int:
        """Behind the tokens that the target has computed, and in a request that is read the last drawn one."""
        return one.end + one.is_read

    def _pass(self, segments: Sequence[Segment], _states: Tensor) -> Tensor:
        return self.model.run(segments, self._pool).last

    def _likeliest(self, states: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
        return likeliest(self.model.decoder.logits(states), rows, width)
