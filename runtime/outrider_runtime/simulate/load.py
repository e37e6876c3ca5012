"""The requests of a simulation: Poisson arrivals, or a trace."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from outrider_runtime.control.batch import NO_CLASS
from outrider_runtime.simulate.bounds import MOST_ARRIVALS, MOST_TOKENS
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.replay.engine import ReplayEngine, Setting
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.workload import (
    Floats,
    Ints,
    Lengths,
    Workload,
    draw_answers,
    draw_classes,
    draw_closed_load,
    open_load,
    poisson,
)
from outrider_runtime.simulate.simulated_deployment import Deployment

SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
"""Default rates, as shares of the requests/s that plain decoding finishes."""
CAPACITY_ROUNDS = 3  # requests per client: the first and the last ones run in smaller batches
LEAST_REQUESTS = 100  # fewer make quantiles of TTFT and TPOT random
TRACE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of the command line."""

    lengths: Lengths
    duration_s: float
    mix: Mapping[str, float]
    """Weight of each SLO class; empty: equal weights."""
    seed: int


def rates(deployment: Deployment, options: LoadOptions) -> list[float]:
    """Return default rates, up to more than plain decoding finishes at full load. Raises SimulationError."""
    clients, rng = deployment.limits.max_requests, np.random.default_rng(0)
    load = draw_closed_load(clients, CAPACITY_ROUNDS * clients, deployment.recording, None, rng, options.lengths)
    setting = Setting(deployment.world, deployment.recording, deployment.drafters, deployment.limits)
    engine = ReplayEngine(setting, _that_fit(deployment, load), Fixed(deployment.drafters))
    engine.run()
    finished = np.sort(engine.requests.done_s)
    middle = slice(clients // 2, len(load) - clients)  # without the start and the end, at which concurrency is lower
    rates_per_s = [share / float(np.diff(finished[middle]).mean()) for share in SHARES]
    _count(options, max(rates_per_s))  # refuse too high a rate before the first simulation
    return rates_per_s


def draw_poisson_load(deployment: Deployment, options: LoadOptions, rate_per_s: float) -> Workload:
    """Draw Poisson arrivals. Raises SimulationError for too many requests, or for requests that can never run."""
    rng = np.random.default_rng([options.seed, 2])
    load = open_load(
        poisson(rate_per_s, _count(options, rate_per_s), rng), deployment.recording, None, rng, options.lengths
    )
    return _with_classes(deployment, options, _that_fit(deployment, load), rng)


def _count(options: LoadOptions, rate_per_s: float) -> int:
    count = rate_per_s * options.duration_s
    if count > MOST_ARRIVALS:
        raise SimulationError(
            f"{rate_per_s:.3g} requests a second for {options.duration_s:g} s are {count:.3g} requests, and "
            f"{MOST_ARRIVALS} at most are simulated: give a lower --rate or a shorter --duration"
        )
    return max(LEAST_REQUESTS, round(count))


def read_trace_load(deployment: Deployment, options: LoadOptions, trace: Path, rate_per_s: float | None) -> Workload:
    """Read a trace; with a rate, scale the gaps between its requests.

    Raises SimulationError for an invalid trace, and for requests that can never run.
    """
    rng = np.random.default_rng([options.seed, 2])
    at_s, prompt, output = read_trace(trace)
    if rate_per_s is not None:
        at_s = at_s * ((len(at_s) - 1) / rate_per_s / at_s[-1])
    no_class = np.full(len(at_s), NO_CLASS, np.int64)
    load = Workload(at_s, prompt, output, no_class, draw_answers(deployment.recording, None, len(at_s), rng))
    return _with_classes(deployment, options, _that_fit(deployment, load), rng)


def _that_fit(deployment: Deployment, load: Workload) -> Workload:
    most = min(deployment.service.longest_request or deployment.limits.kv_tokens, deployment.limits.kv_tokens)
    longest = int((load.prompt + load.output).max())
    if longest > most:
        raise SimulationError(f"a request of {longest} tokens does not fit: this deployment takes {most} at most")
    return load


def _with_classes(deployment: Deployment, options: LoadOptions, load: Workload, rng: np.random.Generator) -> Workload:
    names = [slo_class.name for slo_class in deployment.service.hot.slo_classes]
    unknown = [name for name in options.mix if name not in names]
    if unknown:
        raise SimulationError(
            f"--mix: class {unknown[0]!r} is not in the manifest; it has {', '.join(names) or 'none'}"
        )
    if not names:
        return load
    weights = np.array([options.mix.get(name, 0.0) if options.mix else 1.0 for name in names])
    if weights.sum() <= 0:
        raise SimulationError("--mix: the weights add up to nothing")
    return draw_classes(load, weights / weights.sum(), rng)


def read_trace(path: Path) -> tuple[Floats, Ints, Ints]:
    """Read a trace in the Azure CSV format: arrival times from 0 s on, prompt and output tokens.

    Raises SimulationError, with the line's number, for an invalid file or row.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = sorted(_rows(path, csv.reader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SimulationError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise SimulationError(f"the trace {path} holds no request below its header")
    at_s, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    if at_s[0] == at_s[-1]:
        raise SimulationError(f"the trace {path} has no two arrivals at different times: give --rate without --trace")
    return at_s - at_s[0], prompt, output


def _rows(path: Path, lines: Iterator[list[str]]) -> Iterator[tuple[float, int, int]]:
    for number, cells in enumerate(lines, start=1):
        if not cells or (number == 1 and tuple(cell.strip() for cell in cells) == TRACE_HEADER):
            continue
        try:
            at, prompt, output = cells
            row = _unix_s(at.strip()), int(prompt), int(output)
        except ValueError as error:
            raise SimulationError(f"{path}, line {number}: a row is {','.join(TRACE_HEADER)}; {error}") from error
        if not 1 <= min(row[1:]) <= max(row[1:]) <= MOST_TOKENS:
            raise SimulationError(f"{path}, line {number}: a request has 1 to {MOST_TOKENS} tokens in, and so many out")
        yield row


def _unix_s(text: str) -> float:
    """Unix seconds of a time with or without an offset. Without one it is UTC, whatever the machine's zone is."""
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
