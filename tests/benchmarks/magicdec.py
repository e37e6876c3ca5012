"""Sparse self-speculation on replays: Llama-3.1-8B drafts for itself over 512 tokens, in two worlds.

    python -m tests.benchmarks.magicdec

writes results/magicdec.json. On 8 A100 the rows are those of MagicDec's Table 1, beside the paper's speed-ups: they
follow from the times that it gives and from 2.53 tokens a step, which it measured with two drafted tokens. On one H200
the times are composed, and contexts go as far as its tables do. Replayed are proposals of which as many are accepted.

All requests of a row decode at once, as in the paper; reading prompts is left out. Then contexts go up and come back
while one controller serves. Requests of two phases overlap, in another way under each policy: so a phase is told from
the steps in which its requests alone decode, and the whole from the time that everything takes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.settings import HotSettings, Settings
from outrider_runtime.simulate.replay.engine import Engine, Policy, Setting
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.scheduling import Limits
from outrider_runtime.simulate.replay.workload import Workload, answers_of
from outrider_runtime.simulate.worlds.magicdec import DRAFTED, Row, rows

from tests.benchmarks.replay import settings

RESULTS = Path(__file__).parent / "results" / "magicdec.json"
PLAIN, FIXED, OURS = "plain", "k = 2", "ours"
POOL = (settings.TRAITS["sparse"],)
ACCEPTED_LENGTH = 2.53
"""Of a step with two drafted tokens, budget 512 (Tables 2 and 3)."""
ACCEPTANCE = 0.843
"""Of a proposal, given that those before it were: `k = 2` replays as many tokens a step."""
TOKENS, SEEDS, WAVES = 512, 2, 3
"""Of each answer; of each row; answers after each other, so that a row lasts some hundred steps."""


@dataclass(frozen=True)
class Part:
    """One world."""

    world: str
    longest: int
    """Tokens of a request: what the profile goes by."""
    shift: tuple[int, ...]
    """Contexts of the phases."""
    shift_requests: int

    @property
    def case(self) -> settings.Case:
        return settings.Case(self.world, ACCEPTANCE)


A100 = Part("llama-3.1-8b-8xa100-long", 102_400, (1000, 8000, 32_000, 8000, 1000), 64)
H200 = Part("llama-3.1-8b-h200", 16_384, (1000, 4000, 16_000, 4000, 1000), 32)
H200_ROWS = tuple(
    (context, requests) for context in (1000, 4000, 8000, 16_000) for requests in (8, 32, 128)
    if requests * (context + TOKENS) <= settings.world(H200.world).kv_tokens
)  # fmt: skip


def workload(part: Part, count: int, clients: int, seed: int) -> Workload:
    rng = np.random.default_rng([seed, 3])
    nobody, output = np.full(count, -1, np.int64), np.full(count, TOKENS, np.int64)
    answers = answers_of(settings.recording_of(part.case), None, count, rng)
    return Workload(np.zeros(count), np.ones(count, np.int64), output, nobody, answers, clients)


def decoding_rate(part: Part, name: str, context: int, requests: int, seed: int) -> float:
    """Tokens a second while all requests of a row decode."""
    return alone_rates(served(part, name, [context] * (WAVES * requests), requests, seed), requests, 1)[0]


def alone_rates(engine: Engine, clients: int, phases: int) -> list[float]:
    """Tokens a second in each phase, while `clients` of its requests decode, and nobody else does."""
    log, found = engine.log, []
    now, step_s, tokens, running = map(np.array, (log.now, log.step_s, log.tokens, log.requests))
    begins, ends = (np.split(at, phases) for at in (engine.requests.first_s, engine.requests.done_s))
    for phase in range(phases):
        begun = ends[phase - 1].max() if phase else begins[0][:clients].max()
        over = begins[phase + 1].min() if phase + 1 < phases else np.inf
        inside = (now > begun) & (now <= over) & (running == clients)
        found.append(float(tokens[inside].sum() / step_s[inside].sum()))
    return found


def served(part: Part, name: str, contexts: Sequence[int], clients: int, seed: int) -> Engine:
    """Requests read one token; once they decode they have their context."""
    world = settings.world(part.world)
    limits = Limits(max_requests=settings.SLOTS, kv_tokens=world.kv_tokens)
    cost = settings.decision_us(slo_classes=False) if name == OURS else ((1, 0.0),)
    setting = Setting(world, settings.recording_of(part.case), POOL, limits, cost, asynchronous=True)
    engine = Engine(setting, workload(part, len(contexts), clients, seed), policy(part, name, seed))
    requests, grown = engine.requests, np.zeros(len(contexts), bool)
    while engine.advance():
        new = (requests.produced > 0) & ~grown
        for column in (requests.context, requests.prompt):
            column[new] += np.array(contexts, np.int64)[new] - 1
        grown |= new
    return engine


def policy(part: Part, name: str, seed: int) -> Policy:
    if name == OURS:
        latency = settings.profile(part.world, POOL, seed % settings.PROFILES, part.longest)
        hot = HotSettings(max_draft_tokens=settings.LONGEST)
        graph = settings.world(part.world).graph_tokens
        of_loop = Settings(POOL, settings.LONGEST, settings.SLOTS, largest_graph_tokens=graph, hot=hot)
        return Controller(of_loop, latency, clock=time.perf_counter, rng=np.random.default_rng([seed, 2]))
    return Fixed(POOL) if name == PLAIN else Fixed(POOL, 0, DRAFTED)


def compared(part: Part, context: int, requests: int) -> dict[str, Any]:
    """Speed-ups over plain decoding."""
    rates = {
        name: fmean(decoding_rate(part, name, context, requests, seed) for seed in range(SEEDS))
        for name in (PLAIN, FIXED, OURS)
    }
    fixed, ours = (round(rates[name] / rates[PLAIN], 3) for name in (FIXED, OURS))
    return {"context": context, "requests": requests, "fixed": fixed, "ours": ours}


def of_paper(row: Row) -> float:
    return round(ACCEPTED_LENGTH * row.decode_ms / (row.verify_ms + row.draft_ms), 3)


def shifted(part: Part, seed: int) -> dict[str, Any]:
    """Speed-up over plain decoding of each phase, and of the whole."""
    clients, phases = part.shift_requests, len(part.shift)
    contexts = [context for context in part.shift for _ in range(2 * clients)]
    plain, ours = (served(part, name, contexts, clients, seed) for name in (PLAIN, OURS))
    rates = zip(part.shift, alone_rates(plain, clients, phases), alone_rates(ours, clients, phases), strict=True)
    whole = float(plain.requests.done_s.max() / ours.requests.done_s.max())
    found = [{"context": context, "speedup": round(after / before, 3)} for context, before, after in rates]
    return {"requests": clients, "phases": found, "whole": round(whole, 3)}


def main() -> None:
    found: dict[str, Any] = {A100.world: {"rows": []}, H200.world: {"rows": []}}
    for row in rows("llama-3.1-8b"):
        said = {**compared(A100, row.context, row.requests), "paper": of_paper(row)}
        found[A100.world]["rows"].append(said)
        print(said, flush=True)
    for context, requests in H200_ROWS:
        found[H200.world]["rows"].append(compared(H200, context, requests))
        print(found[H200.world]["rows"][-1], flush=True)
    for part in (A100, H200):
        found[part.world]["shift"] = shifted(part, 0)
        print(found[part.world]["shift"])
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
