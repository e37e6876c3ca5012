"""The load that the command line asks for: a trace, a rate, a trace at a rate, or a number of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.workload import (
    Arrival,
    ClassMix,
    ClosedLoop,
    Lengths,
    OpenLoop,
    Source,
    at_rate,
    poisson,
    read_trace,
    with_classes,
    within,
)

DEFAULT_DURATION_S = 60.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """As given; None: not given."""

    trace: Path | None
    rate_per_s: float | None
    concurrency: int | None
    duration_s: float | None
    lengths: Lengths
    classes: Mapping[str, float]
    """Weight of each SLO class; empty where the manifest has none."""
    seed: int


@dataclass(frozen=True, slots=True)
class Load:
    source: Callable[[], Source]
    """The same requests each time it is called."""
    words: str
    duration_s: float
    """No request comes later."""


def read_load(wanted: Wanted) -> Load:
    """Raises SimulationError where nothing, too much or an unreadable trace is asked for."""
    if wanted.concurrency is not None:
        if wanted.trace is not None or wanted.rate_per_s is not None:
            raise SimulationError("--concurrency keeps so many requests running: leave --trace and --rate out")
        return _clients(wanted, wanted.concurrency)
    if wanted.trace is not None:
        return _traced(wanted, wanted.trace)
    if wanted.rate_per_s is None:
        raise SimulationError("what load? give --rate, --trace or --concurrency")
    return _poisson(wanted, wanted.rate_per_s)


def _clients(wanted: Wanted, clients: int) -> Load:
    duration_s = wanted.duration_s or DEFAULT_DURATION_S

    def source() -> Source:
        rng = _rng(wanted)
        return ClosedLoop(clients, wanted.lengths, ClassMix(wanted.classes, rng), rng, duration_s)

    lengths = wanted.lengths
    mean = f"about {lengths.prompt_tokens} prompt and {lengths.output_tokens} output tokens each"
    return Load(source, f"{clients} requests at any time for {duration_s:g} s, {mean}", duration_s)


def _traced(wanted: Wanted, trace: Path) -> Load:
    arrivals = read_trace(trace)
    if wanted.rate_per_s is not None:
        arrivals = at_rate(arrivals, wanted.rate_per_s)
    if wanted.duration_s is not None:
        arrivals = within(arrivals, wanted.duration_s)
    arrivals = with_classes(arrivals, ClassMix(wanted.classes, _rng(wanted)))
    scaled = "" if wanted.rate_per_s is None else ", its gaps scaled"
    return _open(arrivals, wanted.duration_s or arrivals[-1].at_s, f"{trace.name}{scaled}")


def _poisson(wanted: Wanted, rate_per_s: float) -> Load:
    rng, duration_s = _rng(wanted), wanted.duration_s or DEFAULT_DURATION_S
    arrivals = poisson(rate_per_s, duration_s, wanted.lengths, ClassMix(wanted.classes, rng), rng)
    if not arrivals:
        raise SimulationError(f"no request comes within {duration_s:g} s at {rate_per_s:g} a second: raise --duration")
    return _open(arrivals, duration_s, f"Poisson at {rate_per_s:g} requests a second")


def _open(arrivals: Sequence[Arrival], duration_s: float, words: str) -> Load:
    count = len(arrivals)
    prompt = sum(arrival.prompt_tokens for arrival in arrivals) / count
    output = sum(arrival.output_tokens for arrival in arrivals) / count
    rate = f" ({count / duration_s:.2f} a second)" if duration_s else ""
    figures = f"{count} requests in {duration_s:.0f} s{rate}, {prompt:.0f} prompt and {output:.0f} output tokens each"
    return Load(lambda: OpenLoop(arrivals), f"{words}: {figures}", duration_s)


def _rng(wanted: Wanted) -> np.random.Generator:
    return np.random.default_rng([wanted.seed, 0])
