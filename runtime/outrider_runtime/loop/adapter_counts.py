"""Counts by LoRA adapter: proposals tried and accepted, and requests that met their SLO class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider_crds.counters import AdapterCounters
from outrider_crds.runtime_state import AdapterState

from outrider_runtime.control.batch import Ints
from outrider_runtime.control.plans import Outcome
from outrider_runtime.loop.slo_accounting import EndedRequest

NO_ADAPTER = -1
"""Number of a request without an adapter."""


class AdapterCounter:
    """Counters since the process started, of each adapter that a request has named.

    The scheduler's thread counts, the reporter's reads: each change is one assignment.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._numbers: dict[str, int] = {}
        self._proposals: Ints = np.zeros((2, 0), np.int64)
        """(2, adapters): proposed tokens that were tried, and those that were accepted."""
        self._ended: dict[int, AdapterCounters] = {}

    def __bool__(self) -> bool:
        """Whether any request has named an adapter."""
        return bool(self._names)

    def number(self, adapter: str | None) -> int:
        """Return the number of the adapter, the same each time; NO_ADAPTER for a request without one."""
        if adapter is None:
            return NO_ADAPTER
        if adapter not in self._numbers:
            self._numbers[adapter] = len(self._names)
            self._proposals = np.pad(self._proposals, ((0, 0), (0, 1)))
            self._names = (*self._names, adapter)
        return self._numbers[adapter]

    def observe(self, adapters: Ints, outcome: Outcome) -> None:
        """Count a step's proposals. adapters: (N,), number of each request's adapter."""
        of_node, size = adapters[outcome.forest.request] - NO_ADAPTER, len(self._names) - NO_ADAPTER
        counts = [np.bincount(of_node[counted], minlength=size) for counted in (outcome.tried, outcome.accepted)]
        self._proposals = self._proposals + np.stack(counts)[:, -NO_ADAPTER:]

    def ended(self, adapter: int, request: EndedRequest, *, attained: bool | None) -> None:
        """Count a request that ended. attained: whether it met its SLO class; None without a verdict."""
        if adapter == NO_ADAPTER:
            return
        verdict, name = attained is not None, request.slo_class
        self._ended[adapter] = self._ended.get(adapter, AdapterCounters()) + AdapterCounters(
            output_tokens=request.output_tokens,
            finished={name: 1} if verdict and name is not None else {},
            attained={name: int(bool(attained))} if verdict and name is not None else {},
        )

    def states(self, slo_classes: Sequence[str]) -> list[AdapterState]:
        """Return the counts. slo_classes: names of the classes in force."""
        names, (tried, accepted) = self._names, self._proposals.tolist()
        return [
            _state(name, self._ended.get(number, AdapterCounters()), slo_classes, tried[number], accepted[number])
            for number, name in enumerate(names)
        ]


def _state(name: str, ended: AdapterCounters, classes: Sequence[str], tried: int, accepted: int) -> AdapterState:
    return AdapterState(
        name=name,
        output_tokens=ended.output_tokens,
        tried=tried,
        accepted=accepted,
        finished={slo_class: ended.finished.get(slo_class, 0) for slo_class in classes},
        attained={slo_class: ended.attained.get(slo_class, 0) for slo_class in classes},
    )
