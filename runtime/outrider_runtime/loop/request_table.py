"""The engine's requests: their SLO classes and clocks, and columns that do not change while they run.

Times are monotonic seconds of this process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from outrider_runtime.control.batch import NO_ARM, NO_CLASS, Ints
from outrider_runtime.loop.adapter_counts import NO_ADAPTER, AdapterCounter
from outrider_runtime.loop.arm_counts import ArmCounter
from outrider_runtime.loop.slo_accounting import EndedRequest, SLOCounter
from outrider_runtime.loop.slots import Slots
from outrider_runtime.loop.step_columns import SlotColumns


class End(Enum):
    """How a request's answer ended."""

    COMPLETE = auto()
    LEFT = auto()
    """Its client disconnected."""
    FAILED = auto()
    """The engine failed: the request counts for no SLO class."""


Delivery = tuple[str, int, End | None]
"""A request's name, its tokens that are sent to its user, and how its answer ends; None: more will come. A plain tuple,
since each step makes one for every request."""


@dataclass(slots=True)
class _Request:
    slo_class: str | None
    arrived_at: float
    prompt: int
    limit: int
    arm: int = NO_ARM
    adapter: int = NO_ADAPTER
    first_token_at: float = math.inf
    last_token_at: float = math.nan
    output_tokens: int = 0

    def ended(self, now_s: float, *, aborted: bool) -> EndedRequest:
        last_at = self.last_token_at if self.output_tokens and not aborted else now_s
        first_at = self.first_token_at if self.output_tokens else now_s
        return EndedRequest(self.slo_class, first_at - self.arrived_at, last_at - first_at, self.output_tokens, aborted)


class RequestTable:
    """All requests of the engine, and columns by slot of the running ones."""

    def __init__(
        self,
        slo: SLOCounter,
        arms: ArmCounter,
        adapters: AdapterCounter,
        slots: int,
        predecessor: RequestTable | None = None,
    ) -> None:
        """predecessor: a table whose requests this one takes over."""
        self.slots = Slots(slots)
        self._slo = slo
        self._arms = arms
        self._adapters = adapters
        self._known: dict[str, _Request] = predecessor._known if predecessor else {}
        none, no_class = np.zeros(slots, np.int64), np.full(slots, NO_CLASS, np.int64)
        self._of_slot = SlotColumns(none, none.copy(), no_class, np.full(slots, math.inf))
        self.columns: tuple[Any, ...] = tuple(self._of_slot)
        """Fields of `SlotColumns`, in a plain tuple: compiled calls unpack it faster than a named one."""
        self._arm = np.full(slots, NO_ARM, np.int64)
        self._adapter = np.full(slots, NO_ADAPTER, np.int64)
        self._classes: tuple[str, ...] = ()

    # -- they come and go ---------------------------------------------------------------------------------------

    def arrived(
        self,
        name: str,
        arrival_time: float,
        extra_args: dict[str, object] | None,
        *,
        prompt: int,
        limit: int,
        adapter: str | None = None,
    ) -> None:
        """Add a new request.

        arrival_time: Unix seconds at which the API server received it. prompt: its length in tokens. limit: prompt and
        output tokens at which the request ends. adapter: name of its LoRA adapter.
        """
        waited_s = max(0.0, time.time() - arrival_time)
        slo_class = self._slo.class_of(extra_args)
        arm = self._arms.arrived(name, slo_class)
        number = self._adapters.number(adapter)
        self._known[name] = _Request(slo_class, time.monotonic() - waited_s, prompt, limit, arm, number)

    def deliver(self, deliveries: Iterable[Delivery], now_s: float) -> int:
        """Note a step's tokens, and count the requests that end with them. Returns the number of tokens."""
        delivered, known = 0, self._known
        for name, tokens, end in deliveries:
            delivered += tokens
            request = known.get(name)
            if request is None:
                continue
            if tokens:
                if not request.output_tokens:
                    self._begin(name, request, now_s)
                request.last_token_at = now_s
                request.output_tokens += tokens
            if end is not None:
                del self._known[name]
                if end is not End.FAILED and request.output_tokens:
                    self._count(name, request, request.ended(now_s, aborted=end is End.LEFT))
                else:
                    self._arms.forget(name)
        return delivered

    def _begin(self, name: str, request: _Request, now_s: float) -> None:
        """Note the time of a request's first token."""
        request.first_token_at = now_s
        slot = self.slots.get(name)
        if slot is not None:
            self._of_slot.first_at[slot] = now_s

    def aborted(self, name: str, now_s: float, *, has_stop_strings: bool) -> None:
        """Remove a request whose answer is not complete.

        vLLM's API server sends the same message for a stop string as for a client that disconnects. So a request with
        stop strings and at least one output token counts as complete.
        """
        request = self._known.pop(name, None)
        if request is not None:
            aborted = not (request.output_tokens and has_stop_strings)
            self._count(name, request, request.ended(now_s, aborted=aborted))

    def _count(self, name: str, request: _Request, ended: EndedRequest) -> None:
        attained = self._slo.ended(ended)
        self._arms.ended(name, ended.output_tokens, attained=attained)
        self._adapters.ended(request.adapter, ended, attained=attained)

    # -- what is known of them ----------------------------------------------------------------------------------

    def slo_class(self, name: str) -> str | None:
        request = self._known.get(name)
        return request.slo_class if request else None

    def arrived_at(self, name: str) -> float:
        """Return the time at which the API server received the request; the current time if it is unknown."""
        request = self._known.get(name)
        return request.arrived_at if request else time.monotonic()

    def running(self, names: Sequence[str]) -> Ints:
        """(N,): slots of the requests; a request without a slot gets one."""
        try:
            return self.slots.of(names)
        except KeyError:  # rare: a request is new
            for name in names:
                if name not in self.slots:
                    self._enter(name)
            return self.slots.of(names)

    def number_classes(self, names: tuple[str, ...]) -> None:
        """Put SLO classes in force; a request's class number is its class's position in `names`."""
        if names == self._classes:
            return
        self._classes = names
        for name, request in self._known.items():
            slot = self.slots.get(name)
            if slot is not None:
                self._of_slot.slo_class[slot] = self._number(request.slo_class)

    def class_number(self, name: str) -> int:
        return self._number(self.slo_class(name))

    def arms(self, slots: Ints) -> Ints | None:
        """(N,): canary arms, as `Batch.arm`."""
        return None if self._arms.canary is None else np.asarray(self._arm[slots])

    def adapters(self, slots: Ints) -> Ints | None:
        """(N,): numbers of the requests' LoRA adapters; None while no request has named one."""
        return np.asarray(self._adapter[slots]) if self._adapters else None

    def _enter(self, name: str) -> None:
        slot, request = self.slots.take(name), self._known.get(name)
        self._arms.runs(name)
        own = self._of_slot
        own.prompt[slot] = request.prompt if request else 0
        own.limit[slot] = request.limit if request else 0
        own.first_at[slot] = request.first_token_at if request else math.inf
        own.slo_class[slot] = self._number(request.slo_class if request else None)
        self._arm[slot] = request.arm if request else NO_ARM
        self._adapter[slot] = request.adapter if request else NO_ADAPTER

    def _number(self, slo_class: str | None) -> int:
        return self._classes.index(slo_class) if slo_class in self._classes else NO_CLASS
