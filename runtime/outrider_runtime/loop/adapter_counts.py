"""Counts by LoRA adapter: proposals tried and accepted, and requests that met their SLO class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from outrider_crds.runtime_state import AdapterState

from outrider_runtime.control.batch import Ints
from outrider_runtime.control.plans import Outcome
from outrider_runtime.loop.slo_accounting import EndedRequest

NO_ADAPTER = -1
"""Number of a request without an adapter."""


@dataclass(slots=True)
class _AdapterTotals:
    output_tokens: int = 0
    tried: int = 0
    accepted: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    attained: Counter[str] = field(default_factory=Counter)


class AdapterCounter:
    """Counters since the process started, of each adapter that a request has named."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._counts: list[_AdapterTotals] = []

    def __bool__(self) -> bool:
        """Whether any request has named an adapter."""
        return bool(self._names)

    def number(self, adapter: str | None) -> int:
        """Return the number of the adapter, the same each time; NO_ADAPTER for a request without one."""
        if adapter is None:
            return NO_ADAPTER
        if adapter not in self._numbers:
            self._numbers[adapter] = len(self._names)
            self._names.append(adapter)
            self._counts.append(_AdapterTotals())
        return self._numbers[adapter]

    def observe(self, adapters: Ints, outcome: Outcome) -> None:
        """Count a step's proposals. adapters: (N,), number of each request's adapter."""
        of_node = adapters[outcome.forest.request]
        for number in np.unique(of_node[of_node != NO_ADAPTER]).tolist():
            own = of_node == number
            self._counts[number].tried += int(np.count_nonzero(outcome.tried & own))
            self._counts[number].accepted += int(np.count_nonzero(outcome.accepted & own))

    def ended(self, adapter: int, request: EndedRequest, *, attained: bool | None) -> None:
        """Count a request that ended. attained: whether it met its SLO class; None without a verdict."""
        if adapter == NO_ADAPTER:
            return
        counts = self._counts[adapter]
        counts.output_tokens += request.output_tokens
        if attained is not None and request.slo_class is not None:
            counts.finished[request.slo_class] += 1
            counts.attained[request.slo_class] += attained

    def states(self, slo_classes: Sequence[str]) -> list[AdapterState]:
        """Return the counts. slo_classes: names of the classes in force."""
        return [_state(name, counts, slo_classes) for name, counts in zip(self._names, self._counts, strict=True)]


def _state(name: str, counts: _AdapterTotals, slo_classes: Sequence[str]) -> AdapterState:
    return AdapterState(
        name=name,
        output_tokens=counts.output_tokens,
        tried=counts.tried,
        accepted=counts.accepted,
        finished={slo_class: counts.finished[slo_class] for slo_class in slo_classes},
        attained={slo_class: counts.attained[slo_class] for slo_class in slo_classes},
    )
