"""A draft model: a smaller model with the target's vocabulary. Its KV cache holds committed tokens without gaps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.torch_engine.drafting import RequestStep
from outrider_runtime.torch_engine.drafts.autoregressive import Autoregressive, select_last
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.kv_pool import KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel, Segment
from outrider_runtime.torch_engine.token_sampling import Likeliest, Row, likeliest


class DraftModelDrafter(Autoregressive):
    """Proposes by running a smaller model autoregressively."""

    def __init__(self, model: CachedModel, pool: KVPool) -> None:
        super().__init__(model.number, model.cache, pool, model.weight_bytes)
        self.model = model

    def catch_up(self, gaps: Sequence[tuple[Request, KVGap]]) -> None:
        segments = [
            Segment(request.name, request.tokens[cached : gap.end], cached)
            for request, gap in gaps
            if (cached := self.cache.length(request.name)) < gap.end and self._grow(request.name, gap.end)
        ]
        if segments:
            self.model.run(segments, self._pool)

    def _entries(self, request_step: RequestStep) -> int | None:
        """None if the cache has a gap before the step's tokens: proposals would be made without part of the text."""
        has_no_gap = self.cache.length(request_step.request.name) >= request_step.start
        return self._position(request_step) if has_no_gap else None

    def _read(self, request_steps: Sequence[RequestStep], _layer_inputs: dict[int, Tensor]) -> Tensor:
        segments = []
        for request_step in request_steps:
            request = request_step.request
            cached = self.cache.length(request.name)
            segments.append(Segment(request.name, request.tokens[cached : self._position(request_step)], cached))
        return select_last(self.model.run(segments, self._pool).last, segments)

    def _position(self, request_step: RequestStep) -> int:
        """Position after the tokens that the target computed, and after the token that it drew from them, if any."""
        return request_step.end + request_step.can_be_drafted

    def _pass(self, segments: Sequence[Segment], _states: Tensor) -> Tensor:
        return self.model.run(segments, self._pool).last

    def _likeliest(self, states: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
        return likeliest(self.model.decoder.logits(states), rows, width)
