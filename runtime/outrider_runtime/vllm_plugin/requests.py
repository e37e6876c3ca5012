"""When each request's tokens reached the user, for the SLO counts (engine core process)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.engine import EngineCoreOutputs, FinishReason

from outrider_runtime.vllm_plugin.slo import FinishedRequest, SLOCounter

NOT_COUNTED = (FinishReason.ABORT, FinishReason.ERROR)


@dataclass(slots=True)
class _Times:
    slo_class: str | None
    arrived_at: float
    first_token_at: float | None = None
    output_tokens: int = 0


class RequestBook:
    """Times are monotonic seconds of this process."""

    def __init__(self, slo: SLOCounter) -> None:
        self._slo = slo
        self._times: dict[str, _Times] = {}

    def arrived(self, name: str, arrival_time: float, extra_args: dict[str, object] | None) -> None:
        """`arrival_time`: Unix seconds at which the API server got the request."""
        waited_s = max(0.0, time.time() - arrival_time)
        self._times[name] = _Times(self._slo.class_of(extra_args), time.monotonic() - waited_s)

    def slo_class(self, name: str) -> str | None:
        times = self._times.get(name)
        return times.slo_class if times else None

    def arrived_at(self, name: str) -> float:
        """When the API server got the request; now for one that is not known."""
        times = self._times.get(name)
        return times.arrived_at if times else time.monotonic()

    def elapsed_s(self, name: str, now: float) -> float:
        """Seconds since the request's first token; 0 before it."""
        times = self._times.get(name)
        return now - times.first_token_at if times and times.first_token_at is not None else 0.0

    def deliver(self, outputs: Mapping[int, EngineCoreOutputs], now: float) -> int:
        """A step's tokens go out; counts the requests that finish with them. Returns the number of tokens."""
        delivered = 0
        for client in outputs.values():
            for output in client.outputs:
                tokens = len(output.new_token_ids)
                delivered += tokens
                times = self._times.get(output.request_id)
                if times is None:
                    continue
                times.output_tokens += tokens
                if times.first_token_at is None and tokens:
                    times.first_token_at = now
                if output.finish_reason is not None:
                    del self._times[output.request_id]
                    self._finish(times, output.finish_reason, now)
        return delivered

    def _finish(self, times: _Times, reason: FinishReason, now: float) -> None:
        if reason in NOT_COUNTED or times.first_token_at is None:
            return
        self._slo.finished(
            FinishedRequest(
                slo_class=times.slo_class,
                ttft_s=times.first_token_at - times.arrived_at,
                decode_s=now - times.first_token_at,
                output_tokens=times.output_tokens,
            )
        )

    def aborted(self, name: str) -> None:
        """The client left; such a request is not counted."""
        self._times.pop(name, None)
