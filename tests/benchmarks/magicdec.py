"""MagicDec's Table 1 beside the replay: Llama-3.1-8B on 8 A100, drafting for itself over 512 tokens.

    python -m tests.benchmarks.magicdec

writes results/magicdec.json. All requests of a row decode at once, as in the paper; reading prompts is left out. The
paper gives the times of a row; its speed-up follows from them and from 2.53 tokens a step, which it measured with two
drafted tokens. Replayed are proposals of which as many are accepted. Then contexts go from 1,000 to 32,000 tokens and
back while one controller serves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
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
from outrider_runtime.simulate.worlds.magicdec import DRAFT_PASSES, Row, rows

from tests.benchmarks.replay import settings

RESULTS = Path(__file__).parent / "results" / "magicdec.json"
PLAIN, FIXED, OURS = "plain", "k = 2", "ours"
POOL = (settings.TRAITS["sparse"],)
CASE = settings.Case("llama-3.1-8b-8xa100-long", 0.83)
ACCEPTED_LENGTH = 2.53
"""Of a step with two drafted tokens, budget 512 (Tables 2 and 3)."""
TOKENS, SEEDS = 512, 2
SHIFT, SHIFT_REQUESTS = (1000, 8000, 32000, 8000, 1000), 64


def workload(count: int, clients: int, seed: int) -> Workload:
    rng = np.random.default_rng([seed, 3])
    nobody, output = np.full(count, -1, np.int64), np.full(count, TOKENS, np.int64)
    answers = answers_of(settings.recording_of(CASE), None, count, rng)
    return Workload(np.zeros(count), np.ones(count, np.int64), output, nobody, answers, clients)


def decoding_rate(name: str, row: Row, seed: int) -> float:
    """Tokens a second from the last prompt's end to the first answer's."""
    engine = served(name, [row.context] * row.requests, row.requests, seed)
    now, tokens = np.array(engine.log.now), np.array(engine.log.tokens)
    begun, over = engine.requests.first_s.max(), engine.requests.done_s.min()
    inside = (now > begun) & (now <= over)
    return float(tokens[inside].sum() / (now[inside].max() - begun))


def served(name: str, contexts: Sequence[int], clients: int, seed: int) -> Engine:
    """Requests read one token; once they decode they have their context."""
    world = settings.world(CASE.world)
    limits = Limits(max_requests=settings.SLOTS, kv_tokens=world.kv_tokens)
    cost = settings.decision_us(slo_classes=False) if name == OURS else ((1, 0.0),)
    setting = Setting(world, settings.recording_of(CASE), POOL, limits, cost, asynchronous=True)
    engine = Engine(setting, workload(len(contexts), clients, seed), policy(name, seed))
    requests, grown = engine.requests, np.zeros(len(contexts), bool)
    while engine.advance():
        new = (requests.produced > 0) & ~grown
        for column in (requests.context, requests.prompt):
            column[new] += np.array(contexts, np.int64)[new] - 1
        grown |= new
    return engine


def policy(name: str, seed: int) -> Policy:
    if name == OURS:
        latency = settings.profile(CASE.world, POOL, seed % settings.PROFILES)
        hot = HotSettings(max_draft_tokens=settings.LONGEST)
        of_loop = Settings(POOL, settings.LONGEST, settings.SLOTS, hot=hot)
        return Controller(of_loop, latency, clock=time.perf_counter, rng=np.random.default_rng([seed, 2]))
    return Fixed(POOL) if name == PLAIN else Fixed(POOL, 0, DRAFT_PASSES)


def compared(row: Row) -> dict[str, Any]:
    rates = {name: fmean(decoding_rate(name, row, seed) for seed in range(SEEDS)) for name in (PLAIN, FIXED, OURS)}
    paper = ACCEPTED_LENGTH * row.decode_ms / (row.verify_ms + row.draft_ms)
    return {
        "context": row.context, "requests": row.requests, "paper": round(paper, 3),
        "fixed": round(rates[FIXED] / rates[PLAIN], 3), "ours": round(rates[OURS] / rates[PLAIN], 3),
    }  # fmt: skip


def shifted(seed: int) -> list[dict[str, Any]]:
    """Of each phase, in which as many requests end: the time that it takes plainly, by ours."""
    contexts = [context for context in SHIFT for _ in range(2 * SHIFT_REQUESTS)]
    took = {}
    for name in (PLAIN, OURS):
        done = np.sort(served(name, contexts, SHIFT_REQUESTS, seed).requests.done_s)
        took[name] = np.diff(done[2 * SHIFT_REQUESTS - 1 :: 2 * SHIFT_REQUESTS], prepend=0.0)
    return [
        {"context": context, "speedup": round(float(before / after), 3)}
        for context, before, after in zip(SHIFT, took[PLAIN], took[OURS], strict=True)
    ]


def main() -> None:
    found = []
    for row in rows("llama-3.1-8b"):
        found.append(compared(row))
        print(found[-1], flush=True)
    shift = shifted(0)
    print(shift)
    RESULTS.write_text(json.dumps({"rows": found, "shift": shift}, indent=1) + "\n")


if __name__ == "__main__":
    main()
