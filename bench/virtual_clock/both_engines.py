"""One load in the replay and in vLLM's engine core. A module of its own, so that a new process can import it."""

from __future__ import annotations

from outrider_runtime.simulate.replay.engine import ReplayEngine

from bench.replay.settings import PROFILES, pool, profile
from bench.virtual_clock.cells import Cell
from bench.virtual_clock.engine import Served, Stock, mean_draft_length, serve


def serve_in_both(cell: Cell, seed: int) -> tuple[Served, Served]:
    """Serve one load in the replay and in vLLM."""
    drafter, _, length = cell.system.partition(", k = ")
    stock = None if cell.system == "ours" else Stock(drafter, int(length)) if length else Stock()
    load, latency = cell.load(seed), profile(cell.case.world, pool(cell.case), seed % PROFILES)
    return _replay(cell, seed), serve(cell.setting(), load, stock, latency, asynchronous=cell.asynchronous)


def _replay(cell: Cell, seed: int) -> Served:
    engine = ReplayEngine(cell.setting(), cell.load(seed), cell.policy().build(cell.case, seed))
    engine.run()
    requests = engine.requests
    latency_s = float((requests.done_s - requests.arrived_s).mean())
    return Served(latency_s, mean_draft_length(engine.log), requests.preemptions)
