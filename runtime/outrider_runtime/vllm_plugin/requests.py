"""When each request's tokens reached the user, for the SLO counts (engine core process)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.engine import EngineCoreOutputs, FinishReason

from outrider_runtime.vllm_plugin.slo import EndedRequest, SLOCounter


@dataclass(slots=True)
class _Times:
    slo_class: str | None
    arrived_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    output_tokens: int = 0

    def delivered(self, tokens: int, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.output_tokens += tokens

    def ended(self, now: float, *, aborted: bool) -> EndedRequest:
        last_at = now if aborted or self.last_token_at is None else self.last_token_at
        first_at = now if self.first_token_at is None else self.first_token_at
        return EndedRequest(self.slo_class, first_at - self.arrived_at, last_at - first_at, self.output_tokens, aborted)


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
                if tokens:
                    times.delivered(tokens, now)
                if output.finish_reason is not None:
                    del self._times[output.request_id]
                    self._finish(times, output.finish_reason, now)
        return delivered

    def aborted(self, name: str, now: float, *, has_stop_strings: bool) -> None:
        """A request that is not complete goes.

        vLLM's API server ends an answer at a stop string by the same message as a client that leaves: where the
        request has stop strings and tokens came, it counts as complete.
        """
        times = self._times.pop(name, None)
        if times is not None:
            self._slo.ended(times.ended(now, aborted=times.last_token_at is None or not has_stop_strings))

    def _finish(self, times: _Times, reason: FinishReason, now: float) -> None:
        if reason is not FinishReason.ERROR and times.last_token_at is not None:
            self._slo.ended(times.ended(now, aborted=reason is FinishReason.ABORT))
