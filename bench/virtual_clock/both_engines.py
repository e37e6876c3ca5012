"""One load in the replay and in vLLM's engine core; in a module that a new process can import."""

from __future__ import annotations

from outrider_runtime.simulate.replay.engine import ReplayEngine

from bench.replay.settings import PROFILES, pool, profile
from bench.virtual_clock.cells import Cell
from bench.virtual_clock.engine import Served, Stock, mean_draft_length, served


def both(cell: Cell, seed: int) -> tuple[Served, Served]:
    """Serve one load in the replay and in vLLM."""
    drafter, _, length = cell.system.partition(", k = ")
    stock = None if cell.system == "ours" else Stock(drafter, int(length)) if length else Stock()
    load, latency = cell.load(seed), profile(cell.case.world, pool(cell.case), seed % PROFILES)
    return _replayed(cell, seed), served(cell.setting(), load, stock, latency, asynchronous=cell.asynchronous)


def _replayed(cell: Cell, seed: int) -> Served:
    engine = ReplayEngine(cell.setting(), cell.load(seed), cell.policy().build(cell.case, seed))
    engine.run()
    requests = engine.requests
    latency_s = float((requests.done_s - requests.arrived_s).mean())
    return Served(latency_s, mean_draft_length(engine.log), requests.preemptions)
