"""Sparse self-speculation on replays: Llama-3.1-8B drafts for itself over 512 tokens, in two worlds.

    python -m bench.papers.magicdec

writes results/magicdec.json. On 8 A100 the rows are those of MagicDec's Table 1(c), each with its own tokens a step
(Omega, two drafted). The table also has the paper's printed speed-up, and the higher one that follows from its times
and Omega. The bar is the printed one where that is above 1, and plain decoding where it is not. On one H200 the times
are composed, contexts go as far as its tables do, and Omega is the paper's at the nearest context.

All requests of a row decode at once, as in the paper; prefill is left out. Then contexts go up and come back while one
controller serves. Requests of two phases overlap, in another way under each policy. So a phase is measured in the steps
in which only its requests decode, and the whole by the time that all requests take.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.settings import HotSettings, Settings
from outrider_runtime.simulate.recording import Recording
from outrider_runtime.simulate.replay.engine import Policy, ReplayEngine, Setting
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.step_scheduler import Limits
from outrider_runtime.simulate.replay.workload import Workload

from bench.host_costs import added_us
from bench.papers.magicdec_world import DRAFTED, Row, rows
from bench.replay import settings

RESULTS = Path(__file__).parent / "results" / "magicdec.json"
PLAIN, FIXED, OURS = "plain", "k = 2", "ours"
POOL = (settings.TRAITS["sparse"],)
ROWS = rows("llama-3.1-8b")
AS_PLAIN = 0.99
"""Speed-up up to which a policy counts as plain decoding."""
TOKENS, SEEDS, WAVES = 512, 2, 3
"""Tokens of an answer, and rounds of a row: answers follow each other, so that a row lasts some hundred steps."""


@dataclass(frozen=True)
class Part:
    """One world."""

    world: str
    longest: int
    """Tokens of a request up to which the profile measures."""
    shift: tuple[int, ...]
    """Contexts of the phases."""
    shift_requests: int


A100 = Part("llama-3.1-8b-8xa100-long", 102_400, (1000, 8000, 32_000, 8000, 1000), 64)
H200 = Part("llama-3.1-8b-h200", 16_384, (1000, 4000, 16_000, 4000, 1000), 32)
H200_ROWS = tuple(
    (context, requests) for context in (1000, 4000, 8000, 16_000) for requests in (8, 32, 128)
    if requests * (context + TOKENS) <= settings.world(H200.world).kv_tokens
)  # fmt: skip


@cache
def lift(omega: float) -> float:
    """Find the acceptance, in thousandths, at which lifted chains of two tokens give `omega` tokens per step."""
    shares = np.arange(700, 900) / 1000
    return float(min(shares, key=lambda share: abs(tokens_per_step(settings.recording(float(share))) - omega)))


def tokens_per_step(recording: Recording) -> float:
    """Return the tokens per step of requests of equal length: the harmonic mean over answers."""
    depth = recording.depth[recording.drafters.index("sparse")]
    return 1 / fmean(1 / _answer_tokens_per_step(depth[begin:end]) for begin, end in pairwise(recording.start))


def _answer_tokens_per_step(depth: NDArray[np.int8]) -> float:
    """Return the tokens per step of one answer. depth: (positions,), accepted tokens of a proposal made there."""
    place, steps = 0, 0
    while place < len(depth):
        place, steps = place + 1 + min(int(depth[place]), DRAFTED), steps + 1
    return place / steps


def nearest_omega(context: int) -> float:
    """Return the paper's Omega in the row whose context is nearest."""
    return min(ROWS, key=lambda row: abs(row.context - context)).omega


@dataclass(frozen=True)
class Cell:
    """Requests that decode at once, and their tokens per step."""

    part: Part
    requests: int
    omega: float

    @property
    def recording(self) -> Recording:
        return settings.recording(lift(self.omega))


def workload(cell: Cell, count: int, seed: int) -> Workload:
    rng = np.random.default_rng([seed, 3])
    no_class, output = np.full(count, -1, np.int64), np.full(count, TOKENS, np.int64)
    answers = np.resize(rng.permutation(cell.recording.answers), count)
    return Workload(np.zeros(count), np.ones(count, np.int64), output, no_class, answers, cell.requests)


def decoding_rate(cell: Cell, name: str, context: int, seed: int) -> float:
    """Return tokens/s while all requests of a row decode."""
    return alone_rates(serve(cell, name, [context] * (WAVES * cell.requests), seed), cell.requests, 1)[0]


def alone_rates(engine: ReplayEngine, clients: int, phases: int) -> list[float]:
    """Return tokens/s in each phase, over the time in which only `clients` of its requests decode."""
    log, rates = engine.log, []
    output_at_s, step_s, tokens, running = map(np.array, (log.output_at_s, log.step_s, log.tokens, log.requests))
    begins, ends = (np.split(at, phases) for at in (engine.requests.first_s, engine.requests.done_s))
    for phase in range(phases):
        begun = ends[phase - 1].max() if phase else begins[0][:clients].max()
        over = begins[phase + 1].min() if phase + 1 < phases else np.inf
        inside = (output_at_s > begun) & (output_at_s <= over) & (running == clients)
        rates.append(float(tokens[inside].sum() / step_s[inside].sum()))
    return rates


def serve(cell: Cell, name: str, contexts: Sequence[int], seed: int) -> ReplayEngine:
    """Replay requests with prompts of one token, each lengthened to its context once it decodes."""
    world = settings.world(cell.part.world)
    limits = Limits(max_requests=settings.MOST_REQUESTS, kv_tokens=world.kv_tokens)
    cost = added_us([drafter.name for drafter in POOL]) if name == OURS else ((1, 0.0),)
    setting = Setting(world, cell.recording, POOL, limits, cost, asynchronous=True)
    engine = ReplayEngine(setting, workload(cell, len(contexts), seed), policy(cell.part, name, seed))
    requests, grown = engine.requests, np.zeros(len(contexts), bool)
    while engine.advance():
        new = (requests.produced > 0) & ~grown
        engine.lengthen(np.flatnonzero(new), np.array(contexts, np.int64)[new] - 1)
        grown |= new
    return engine


def policy(part: Part, name: str, seed: int) -> Policy:
    if name == OURS:
        latency = settings.profile(part.world, POOL, seed % settings.PROFILES, part.longest)
        hot = HotSettings(max_draft_tokens=settings.LONGEST)
        graph = settings.world(part.world).graph_tokens
        of_loop = Settings(
            POOL, settings.LONGEST, settings.SLOTS, largest_graph_tokens=graph, hot=hot, scores_placeholders=True
        )  # fmt: skip
        return Controller(of_loop, latency, clock=time.perf_counter, rng=np.random.default_rng([seed, 2]))
    return Fixed(POOL) if name == PLAIN else Fixed(POOL, 0, DRAFTED)


def measure_speedups(cell: Cell, context: int) -> dict[str, Any]:
    """Return the speed-ups over plain decoding of the fixed length and of the loop."""
    rates = {
        name: fmean(decoding_rate(cell, name, context, seed) for seed in range(SEEDS)) for name in (PLAIN, FIXED, OURS)
    }
    fixed, ours = (round(rates[name] / rates[PLAIN], 3) for name in (FIXED, OURS))
    return {"context": context, "requests": cell.requests, "omega": cell.omega, "fixed": fixed, "ours": ours}


def compare_with_paper(row: Row) -> dict[str, Any]:
    figures = measure_speedups(Cell(A100, row.requests, row.omega), row.context)
    by_times = round(row.omega * row.decode_ms / (row.verify_ms + row.draft_ms), 3)
    bar = row.speedup if row.speedup > 1 else AS_PLAIN
    return {**figures, "byTimes": by_times, "printed": row.speedup, "holds": figures["ours"] >= bar}


def measure_shift(part: Part, seed: int) -> dict[str, Any]:
    """Return the speed-up over plain decoding of each phase and of the whole; Omega is that of the longest context."""
    cell, phases = Cell(part, part.shift_requests, nearest_omega(max(part.shift))), len(part.shift)
    contexts = [context for context in part.shift for _ in range(2 * cell.requests)]
    plain, ours = (serve(cell, name, contexts, seed) for name in (PLAIN, OURS))
    before, after = (alone_rates(engine, cell.requests, phases) for engine in (plain, ours))
    whole = float(plain.requests.done_s.max() / ours.requests.done_s.max())
    figures = [
        {"context": context, "speedup": round(fast / slow, 3)}
        for context, slow, fast in zip(part.shift, before, after, strict=True)
    ]
    return {"requests": cell.requests, "omega": cell.omega, "seed": seed, "phases": figures, "whole": round(whole, 3)}


def print_and_return(figures: dict[str, Any]) -> dict[str, Any]:
    print(figures, flush=True)
    return figures


def main() -> None:
    with_printed = [print_and_return(compare_with_paper(row)) for row in ROWS]
    alone = [
        print_and_return(measure_speedups(Cell(H200, requests, nearest_omega(context)), context))
        for context, requests in H200_ROWS
    ]
    shifts = {
        part.world: [print_and_return(measure_shift(part, seed)) for seed in range(SEEDS)] for part in (A100, H200)
    }
    print(f"{sum(row['holds'] for row in with_printed)} of {len(with_printed)} rows hold")
    figures = {
        part.world: {"rows": lines, "shift": shifts[part.world]}
        for part, lines in ((A100, with_printed), (H200, alone))
    }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
