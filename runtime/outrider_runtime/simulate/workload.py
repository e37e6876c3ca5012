"""Who asks for what, and when: arrivals from a trace or a Poisson process, or a fixed number of clients."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from outrider_runtime.simulate.errors import SimulationError

TRACE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Of the Azure LLM inference traces (azure_llm_2023_code.csv)."""
SPREAD = 0.5
"""Drawn lengths lie between half and one and a half of their mean."""


class Arrival(NamedTuple):
    at_s: float
    """Seconds from the start."""
    prompt_tokens: int
    output_tokens: int
    slo_class: str | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a request where no trace says them; drawn evenly from 0.5 to 1.5 of the mean."""

    prompt_tokens: int = 512
    output_tokens: int = 128

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        low, high = 1 - SPREAD, 1 + SPREAD
        prompt, output = rng.uniform(low, high, 2) * (self.prompt_tokens, self.output_tokens)
        return max(1, round(prompt)), max(1, round(output))


class ClassMix:
    """Draws each request's SLO class."""

    def __init__(self, shares: Mapping[str, float], rng: np.random.Generator) -> None:
        """`shares`: weight of each class, any sum; empty where there are no classes."""
        self._names = list(shares)
        weights = np.array(list(shares.values()), dtype=float)
        self._bounds = np.cumsum(weights / weights.sum()) if self._names else weights
        self._rng = rng

    def draw(self) -> str | None:
        if not self._names:
            return None
        position = int(np.searchsorted(self._bounds, self._rng.random(), side="right"))
        return self._names[min(position, len(self._names) - 1)]


class Source(Protocol):
    """Where an engine's requests come from."""

    def due(self, now_s: float, active: int) -> Sequence[Arrival]:
        """Requests that have come by `now_s` and were not given out yet; `active`: those in the engine."""

    def next_at_s(self) -> float | None:
        """When the next one comes; None: none ever (or only once others finish)."""


class OpenLoop:
    """Requests come when they come, whatever the engine does."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.at_s)
        self._next = 0

    def due(self, now_s: float, active: int) -> Sequence[Arrival]:  # noqa: ARG002
        first = self._next
        while self._next < len(self._arrivals) and self._arrivals[self._next].at_s <= now_s:
            self._next += 1
        return self._arrivals[first : self._next]

    def next_at_s(self) -> float | None:
        return self._arrivals[self._next].at_s if self._next < len(self._arrivals) else None


class ClosedLoop:
    """`clients` requests at any time until `until_s`: a finished one is replaced at once. `clients` may be changed."""

    def __init__(
        self, clients: int, lengths: Lengths, mix: ClassMix, rng: np.random.Generator, until_s: float = math.inf
    ) -> None:
        self.clients = clients
        self._lengths, self._mix, self._rng, self._until_s = lengths, mix, rng, until_s

    def due(self, now_s: float, active: int) -> Sequence[Arrival]:
        if now_s >= self._until_s:
            return ()
        return [Arrival(now_s, *self._lengths.draw(self._rng), self._mix.draw()) for _ in range(self.clients - active)]

    def next_at_s(self) -> float | None:
        return None


def poisson(
    rate_per_s: float, duration_s: float, lengths: Lengths, mix: ClassMix, rng: np.random.Generator
) -> list[Arrival]:
    """Arrivals of a Poisson process within [0, duration_s)."""
    arrivals: list[Arrival] = []
    at_s = float(rng.exponential(1 / rate_per_s))
    while at_s < duration_s:
        arrivals.append(Arrival(at_s, *lengths.draw(rng), mix.draw()))
        at_s += float(rng.exponential(1 / rate_per_s))
    return arrivals


def read_trace(path: Path) -> list[Arrival]:
    """A trace in the Azure CSV format, its first request at 0 s.

    Raises SimulationError, with the line's number, for a file or a row that is none.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(_rows(path, csv.reader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SimulationError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise SimulationError(f"the trace {path} holds no request below its header")
    rows.sort(key=lambda arrival: arrival.at_s)
    start_s = rows[0].at_s
    return [arrival._replace(at_s=arrival.at_s - start_s) for arrival in rows]


def _rows(path: Path, lines: Iterator[list[str]]) -> Iterator[Arrival]:
    for number, cells in enumerate(lines, start=1):
        if number == 1 and tuple(cell.strip() for cell in cells) == TRACE_HEADER:
            continue
        if cells:
            yield _row(f"{path}, line {number}", cells)


def _row(place: str, cells: list[str]) -> Arrival:
    if len(cells) != len(TRACE_HEADER):
        raise SimulationError(f"{place}: has {len(cells)} columns; a trace row is {','.join(TRACE_HEADER)}")
    return Arrival(
        _seconds(place, cells[0].strip()),
        _tokens(place, "ContextTokens", cells[1]),
        _tokens(place, "GeneratedTokens", cells[2]),
    )


def _seconds(place: str, text: str) -> float:
    """A date with a time (seven decimals in Azure's files), or plain seconds."""
    try:
        return datetime.fromisoformat(text[:26]).timestamp()
    except ValueError:
        pass
    try:
        at_s = float(text)
    except ValueError:
        at_s = math.nan
    if not math.isfinite(at_s):
        raise SimulationError(
            f"{place}: TIMESTAMP {text!r} is neither a time such as 2023-11-16 18:17:03.98 nor seconds"
        )
    return at_s


def _tokens(place: str, column: str, text: str) -> int:
    try:
        tokens = int(text)
    except ValueError:
        tokens = 0
    if tokens < 1:
        raise SimulationError(f"{place}: {column} {text.strip()!r} is not a whole number of 1 or more")
    return tokens


def at_rate(arrivals: Sequence[Arrival], rate_per_s: float) -> list[Arrival]:
    """The same gaps, stretched or pressed so that requests come at `rate_per_s` on average."""
    span_s = arrivals[-1].at_s
    if span_s <= 0:
        return list(arrivals)
    factor = (len(arrivals) - 1) / rate_per_s / span_s
    return [arrival._replace(at_s=arrival.at_s * factor) for arrival in arrivals]


def within(arrivals: Iterable[Arrival], duration_s: float) -> list[Arrival]:
    return [arrival for arrival in arrivals if arrival.at_s < duration_s]


def with_classes(arrivals: Iterable[Arrival], mix: ClassMix) -> list[Arrival]:
    return [arrival._replace(slo_class=mix.draw()) for arrival in arrivals]
