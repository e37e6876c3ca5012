"""Counts the requests of each SLO class that met their TPOT and TTFT, aborted requests included."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider_crds.base import seconds
from outrider_crds.counters import TPOT_BUCKETS_S, TTFT_BUCKETS_S, HistogramState, SLOClassCounters
from outrider_crds.runtime_state import SLOClassState
from outrider_crds.spec import SLOClassSpec

SLO_CLASS_ARGUMENT = "slo_class"
"""Key in SamplingParams.extra_args; the server puts the request's header or body field there."""
LONGEST_LIMIT_MS = 86_400_000.0
"""A day: no request has a looser SLO."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    slo_class: str | None
    ttft_s: float
    """Time to the first token; to the client's disconnect if there was none."""
    decode_s: float
    """Time from the first token to the last one, or to the client's disconnect."""
    output_tokens: int
    aborted: bool = False
    """Whether the client disconnected before the answer was complete."""

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one; None for a single token.

        An aborted request gets a lower bound: its next token counts as if it had arrived at the disconnect.
        """
        intervals = self.output_tokens if self.aborted else self.output_tokens - 1
        return self.decode_s / intervals if intervals > 0 else None


class SLOCounter:
    """Counters since the process started; a class that is removed and added again continues its counters."""

    def __init__(self) -> None:
        self._classes: dict[str, SLOClassSpec] = {}
        self._default: str | None = None
        self._counts: dict[str, SLOClassCounters] = {}
        self._ended: deque[tuple[str, EndedRequest, bool | None]] = deque()
        """Class, request and verdict of requests that are not in `_counts` yet. The scheduler's thread appends, and the
        reporter's takes them, since adding models would take a noticeable part of a step."""

    def configure(self, classes: Sequence[SLOClassSpec], default: str | None) -> None:
        """Put classes in force for requests that finish from now on."""
        self._classes = {slo_class.name: slo_class for slo_class in classes}
        self._default = default

    def class_of(self, extra_args: dict[str, object] | None) -> str | None:
        """Return the class that a request names, else the class that meets its own SLO, else the default one.

        None without classes. The class is fixed at arrival; if it is removed before the end, the request counts for no
        class.
        """
        arguments = extra_args or {}
        named = arguments.get(SLO_CLASS_ARGUMENT)
        if isinstance(named, str) and named in self._classes:
            return named
        tpot_s, ttft_s = _limit_s(arguments, "slo_tpot_ms"), _limit_s(arguments, "slo_ttft_ms")
        return self._default if tpot_s == ttft_s == math.inf else self._class_within(tpot_s, ttft_s)

    def _class_within(self, tpot_s: float, ttft_s: float) -> str | None:
        """Return the loosest class that keeps both limits; the tightest class if none does."""
        classes = sorted(self._classes.values(), key=lambda slo: (seconds(slo.tpot), _ttft_s(slo)))
        keeping = [slo.name for slo in classes if seconds(slo.tpot) <= tpot_s and _ttft_s(slo) <= ttft_s]
        return keeping[-1] if keeping else classes[0].name if classes else None

    def ended(self, request: EndedRequest) -> bool | None:
        """Count the request and return whether it met its class; None without a verdict.

        A request that had missed its SLO before the client disconnected counts as a miss. Other aborted requests give
        no verdict.
        """
        slo_class = self._classes.get(request.slo_class or "")
        if slo_class is None:
            return None
        attained = _attained(slo_class, request)
        verdict = None if request.aborted and attained else attained
        self._ended.append((slo_class.name, request, verdict))
        return verdict

    def states(self) -> list[SLOClassState]:
        """Return the counters of the classes in force. Only one thread may call it."""
        while self._ended:
            name, request, verdict = self._ended.popleft()
            counted = SLOClassCounters(aborted=int(request.aborted)) if verdict is None else _counted(request, verdict)
            self._counts[name] = self._counts.get(name, SLOClassCounters()) + counted
        return [SLOClassState(name=name, **dict(self._counts.get(name, SLOClassCounters()))) for name in self._classes]


def _counted(request: EndedRequest, attained: bool) -> SLOClassCounters:
    """Return what a request with a verdict adds to its class."""
    return SLOClassCounters(
        finished=1,
        attained=int(attained),
        aborted=int(request.aborted),
        output_tokens=request.output_tokens,
        tpot=HistogramState.of(TPOT_BUCKETS_S, *([] if request.tpot_s is None else [request.tpot_s])),
        ttft=HistogramState.of(TTFT_BUCKETS_S, request.ttft_s),
    )


def _limit_s(arguments: Mapping[str, object], key: str) -> float:
    """Return a limit of the request in seconds; infinite if it has none, or one that is no time.

    vLLM takes any number, and a list: an error here would be one of the loop.
    """
    value = arguments.get(key)
    return value / 1000 if isinstance(value, int | float) and 0 < value <= LONGEST_LIMIT_MS else math.inf


def _ttft_s(slo_class: SLOClassSpec) -> float:
    return seconds(slo_class.ttft) if slo_class.ttft is not None else math.inf


def _attained(slo_class: SLOClassSpec, request: EndedRequest) -> bool:
    fast_enough = request.tpot_s is None or request.tpot_s <= seconds(slo_class.tpot)
    soon_enough = slo_class.ttft is None or request.ttft_s <= seconds(slo_class.ttft)
    return fast_enough and soon_enough
