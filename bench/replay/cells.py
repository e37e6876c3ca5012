"""A cell: one policy on one load, and its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from outrider_runtime.simulate.replay.engine import ReplayEngine
from outrider_runtime.simulate.replay.workload import Workload

from bench.replay.settings import Case, System, setting

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Result:
    goodput: float
    """Tokens per second. In a closed load: after each client's first request, while all clients are served."""
    latency_s: float
    """Mean request latency, from arrival to the last token."""
    draft_length: float
    """Mean proposals verified per request and step."""
    steps: int
    ttft_s: Floats
    tpot_s: Floats
    slo_class: NDArray[np.int64]
    done_s: Floats
    arrived_s: Floats


@dataclass(slots=True)
class Count:
    """Cells that this process has run."""

    cells: int = 0


COUNT = Count()


def run(case: Case, system: System, load: Workload, seed: int) -> Result:
    COUNT.cells += 1
    engine = ReplayEngine(setting(case, system), load, system.build(case, seed))
    engine.run()
    return _result(engine)


def _result(engine: ReplayEngine) -> Result:
    requests, load, log = engine.requests, engine.requests.load, engine.log
    tokens, step_s = np.array(log.tokens), np.array(log.step_s)
    goodput = float(tokens.sum() / engine.now)
    if load.clients is not None:
        started = int(np.searchsorted(log.output_at_s, requests.done_s[: load.clients].max(), side="right"))
        goodput = _steady_goodput(tokens[started:], step_s[started:], np.array(log.requests)[started:], load.clients)
    further = np.maximum(1, load.output - 1)
    return Result(
        goodput=goodput,
        latency_s=float((requests.done_s - requests.arrived_s).mean()),
        draft_length=sum(log.verified) / max(1, sum(log.requests)),
        steps=len(log.output_at_s),
        ttft_s=requests.first_s - requests.arrived_s,
        tpot_s=(requests.done_s - requests.first_s) / further,
        slo_class=load.slo_class,
        done_s=requests.done_s,
        arrived_s=requests.arrived_s,
    )


def _steady_goodput(tokens: NDArray[np.int64], step_s: Floats, requests: NDArray[np.int64], clients: int) -> float:
    """Return tokens/s up to the last step in which all clients are served."""
    full = np.flatnonzero(requests >= clients)
    last = full[-1] + 1 if len(full) else len(tokens)
    return float(tokens[:last].sum() / step_s[:last].sum())
