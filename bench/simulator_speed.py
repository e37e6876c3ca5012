"""How fast the replay is: CPU time per step, and cells per minute.

    python -m bench.simulator_speed

writes results/simulator_speed.json. Each point replays Llama-3.1-8B with an EAGLE-3 head and prompt lookup on an H100,
a fixed number of requests at any time. The policy's own time is measured apart; the rest is the simulator's.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider_runtime.simulate.replay.engine import ReplayEngine

from bench.replay.settings import Case, loop_system, plain_decoding, setting
from bench.replay.static_load import Point as Load
from bench.replay.static_load import load

RESULTS = Path(__file__).parent / "results"
CASE = Case("llama-3.1-8b-h100", 0.7)
BATCHES = (1, 8, 64, 128)
ROUNDS = 3
DECISIONS = ("plan_verify", "plan_draft", "observe", "release")


@dataclass(frozen=True)
class Point:
    policy: str
    requests: int
    steps: int
    tokens: int
    step_us: float
    """CPU time per step, the policy's included; the lowest of ROUNDS."""
    simulator_us: float
    """CPU time per step without the policy's."""
    cells_a_minute: float


class Timed:
    """A policy whose own CPU time is added up."""

    def __init__(self, policy: Any) -> None:
        self.seconds = 0.0
        for name in DECISIONS:
            setattr(self, name, self._add_timing(getattr(policy, name)))

    def _add_timing(self, decide: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_time(*arguments: Any) -> Any:
            began = time.thread_time()
            decision = decide(*arguments)
            self.seconds += time.thread_time() - began
            return decision

        return run_and_time


def measure(name: str, requests: int) -> Point:
    system = {"ours": loop_system(), "plain": plain_decoding()}[name]
    best = min((_round(system, requests) for _ in range(ROUNDS)), key=lambda timed_round: timed_round[0])
    cpu_s, policy_s, engine = best
    steps = len(engine.log.output_at_s)
    return Point(
        name, requests, steps, sum(engine.log.tokens), round(1e6 * cpu_s / steps, 1),
        round(1e6 * (cpu_s - policy_s) / steps, 1), round(60 / cpu_s, 1),
    )  # fmt: skip


def _round(system: Any, requests: int) -> tuple[float, float, ReplayEngine]:
    policy: Any = Timed(system.build(CASE, 0))
    engine = ReplayEngine(setting(CASE, system), load(Load(CASE, requests), 0), policy)
    began = time.thread_time()
    engine.run()
    return time.thread_time() - began, policy.seconds, engine


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    points = []
    for name in ("ours", "plain"):
        for requests in BATCHES:
            points.append(measure(name, requests))
            print(points[-1], flush=True)
    document = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "points": [asdict(point) for point in points],
    }
    (RESULTS / "simulator_speed.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
