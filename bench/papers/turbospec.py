"""TurboSpec's tables 4 and 5 and the replay: mean request latency / latency of plain decoding.

    python -m bench.papers.turbospec

writes results/turbospec.json. Lengths and acceptance are those of the paper's tables 2 and 3 for ShareGPT. Step times
differ from the paper's, so a row stands for a load: its rate here is the one at which plain decoding has as many
requests in flight as in the paper (rate times latency). It is given as a share of plain decoding's capacity.

The paper's vLLM verified by batch expansion: every verified token was a sequence of its own and read the whole context
again. vLLM today reads it once for all. Both are replayed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.settings import Drafter, HotSettings, Settings
from outrider_runtime.simulate import recording as recordings
from outrider_runtime.simulate.recording import Recording
from outrider_runtime.simulate.replay.engine import Policy, ReplayEngine, Setting
from outrider_runtime.simulate.replay.fitted_profile import fit_profile
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.step_scheduler import Limits
from outrider_runtime.simulate.replay.workload import Lengths, Workload, draw_closed_load, open_load, poisson
from outrider_runtime.simulate.worlds import world as worlds
from outrider_runtime.simulate.worlds.world import Pass, TargetTimes, World

RESULTS = Path(__file__).parent / "results"
POOL = (Drafter("draft", passes=True, needs_kv=True),)
STATIC = (1, 3, 5, 7)
LONGEST = 7
LIMITS = Limits()
DURATION_S, LEAST_REQUESTS = 60.0, 60
PROMPT_TOKENS = 227
BISECTIONS = 8


@dataclass(frozen=True, eq=False)
class Table:
    number: int
    world: str
    output_tokens: int
    acceptance: float
    seconds: Mapping[int, tuple[float, ...]]
    """Latencies by requests/s: plain decoding, k = 1, 3, 5, 7, TurboSpec."""


TABLES = (
    Table(
        4, "vicuna-7b-l40s", 256, 0.62,
        {
            1: (2.63, 1.85, 1.36, 1.34, 1.31, 1.34),
            4: (3.39, 2.51, 1.91, 1.92, 2.05, 1.90),
            8: (4.86, 3.78, 2.91, 3.25, 4.19, 2.98),
            16: (13.73, 15.91, 15.01, 23.50, 33.40, 13.62),
        },
    ),
    Table(
        5, "vicuna-33b-2xh100", 274, 0.59,
        {
            1: (2.88, 2.14, 1.73, 1.73, 1.81, 1.73),
            4: (3.73, 3.06, 2.51, 2.65, 3.10, 2.65),
            8: (4.69, 4.61, 4.24, 6.67, 12.63, 4.44),
            16: (11.21, 24.31, 32.82, 47.29, 62.22, 11.67),
        },
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Latency / latency of plain decoding, for k = 1, 3, 5, 7 and the closed loop (in the paper: TurboSpec)."""

    table: int
    paper_rate: int
    in_flight: float
    share_of_capacity: float
    paper: tuple[float, ...]
    expanded: tuple[float, ...]
    """Replayed with batch expansion."""
    today: tuple[float, ...]
    """Replayed as vLLM verifies today."""


def measure(table: Table, paper_rate: int) -> Row:
    plain_s, *others_s = table.seconds[paper_rate]
    in_flight = paper_rate * plain_s
    rate = _rate(table, in_flight)
    load = _load(table, rate)
    own_s = latency_s(table, load, Fixed(POOL))
    return Row(
        table.number, paper_rate, round(in_flight, 1), round(rate / _capacity(table), 2),
        tuple(round(ratio / plain_s, 2) for ratio in others_s),
        *(_ratios(table, load, own_s, world) for world in (expand_batches(load_world(table)), load_world(table))),
    )  # fmt: skip


def _ratios(table: Table, load: Workload, plain_s: float, world: World) -> tuple[float, ...]:
    policies = [*(Fixed(POOL, 0, k) for k in STATIC), closed_loop(world)]
    return tuple(round(latency_s(table, load, policy, world) / plain_s, 2) for policy in policies)


def closed_loop(world: World, seed: int = 1) -> Policy:
    """Make the closed loop, with a profile fitted to `world`. seed: for the times of its trials."""
    hot = HotSettings(max_draft_tokens=LONGEST)
    settings = Settings(
        POOL, LONGEST, LIMITS.slots, largest_graph_tokens=world.graph_tokens, hot=hot, scores_placeholders=True
    )  # fmt: skip
    profile = fit_profile(world, POOL, np.random.default_rng(0))
    return Controller(settings, profile, clock=time.perf_counter, rng=np.random.default_rng(seed))


def latency_s(table: Table, load: Workload, policy: Policy, world: World | None = None) -> float:
    requests = run_policy(table, load, policy, world).requests
    return float((requests.done_s - requests.arrived_s).mean())


def run_policy(table: Table, load: Workload, policy: Policy, world: World | None = None) -> ReplayEngine:
    world = world or load_world(table)
    setting = Setting(
        world, _recording(table), POOL, replace(LIMITS, kv_tokens=world.kv_tokens), confidences=False
    )  # fmt: skip
    engine = ReplayEngine(setting, load, policy)
    engine.run()
    return engine


def _load(table: Table, rate: float) -> Workload:
    rng = np.random.default_rng(2)
    count = max(LEAST_REQUESTS, round(rate * DURATION_S))
    return open_load(poisson(rate, count, rng), _recording(table), None, rng, _lengths(table))


def _rate(table: Table, in_flight: float) -> float:
    """Find the requests/s at which plain decoding has `in_flight` requests in flight, by bisection."""
    low, high = _capacity(table) / 64, 2 * _capacity(table)
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        requests_in_flight = middle * latency_s(table, _load(table, middle), Fixed(POOL))
        low, high = (middle, high) if requests_in_flight < in_flight else (low, middle)
    return math.sqrt(low * high)


@cache
def _capacity(table: Table) -> float:
    """Measure the requests/s that plain decoding finishes with as many requests at a time as fit."""
    load = draw_closed_load(
        LIMITS.max_requests, 3 * LIMITS.max_requests, _recording(table), None, np.random.default_rng(3), _lengths(table)
    )
    engine = run_policy(table, load, Fixed(POOL))
    return len(load) / engine.now


def _lengths(table: Table) -> Lengths:
    return Lengths(PROMPT_TOKENS, table.output_tokens)


@cache
def load_world(table: Table) -> World:
    return worlds.load(table.world)


@dataclass(frozen=True)
class Expanded:
    """A target whose verified tokens are sequences of their own."""

    target: TargetTimes

    def ms(self, work: Pass, tokens: int) -> float:
        return self.target.ms(replace(work, requests=round(work.requests * work.queries)), tokens)


def expand_batches(world: World) -> World:
    return replace(world, target=Expanded(world.target))


@cache
def _recording(table: Table) -> Recording:
    return recordings.rename_for_pool(
        recordings.load_shipped(), {"draft": "draft"}, {"draft": table.acceptance}, seed=0
    )


def main() -> None:
    rows = []
    for table in TABLES:
        for paper_rate in table.seconds:
            rows.append(measure(table, paper_rate))
            print(rows[-1], flush=True)
    document = {"policies": [*(f"k = {k}" for k in STATIC), "closed loop"], "rows": [asdict(row) for row in rows]}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "turbospec.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
