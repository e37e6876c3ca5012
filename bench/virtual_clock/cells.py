"""The cells: a workload, a system, and how vLLM schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from outrider_runtime.simulate.replay.engine import Setting
from outrider_runtime.simulate.replay.workload import Lengths, Workload, draw_closed_load, open_load, poisson

from bench.replay.plan import capacity
from bench.replay.settings import Case, System, case_recording, loop_system, setting, singles

LENGTHS = Lengths(300, 128)
REQUESTS, LEAST_REQUESTS = 150, 48
H200, A100 = Case("llama-3.1-8b-h200", 0.7), Case("llama-3.1-8b-a100", 0.9)
H200_HALF = Case("llama-3.1-8b-h200", 0.5)
SMALL_KV_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Cell:
    case: Case
    system: str
    """`ours`, or one of `settings.singles`."""
    share: float | None = None
    """Arrivals, as a share of what plain decoding serves; None: a closed load."""
    clients: int = 0
    asynchronous: bool = False
    little_memory: bool = False

    def __str__(self) -> str:
        load = f"{self.clients} requests" if self.share is None else f"{self.share:.0%} of capacity"
        more = ", little memory" * self.little_memory + ", asynchronous" * self.asynchronous
        return f"{self.system}, {self.case}, {load}{more}"

    def load(self, seed: int) -> Workload:
        rng, recording = np.random.default_rng([seed, 23]), case_recording(self.case)
        if self.share is None:
            count = max(LEAST_REQUESTS, min(REQUESTS, 12 * self.clients), 3 * self.clients)
            return draw_closed_load(self.clients, count, recording, None, rng, LENGTHS)
        at_s = poisson(self.share * capacity(self.case.world), REQUESTS, rng)
        return open_load(at_s, recording, None, rng, LENGTHS)

    def policy(self) -> System:
        """Make the replay's policy; its decisions take no time, as the engine's host does not."""
        return replace(loop_system(), loop=False) if self.system == "ours" else singles(self.case)[self.system]

    def setting(self) -> Setting:
        base_setting = replace(setting(self.case, self.policy()), confidences=False, asynchronous=self.asynchronous)
        limits = replace(base_setting.limits, kv_tokens=SMALL_KV_TOKENS) if self.little_memory else base_setting.limits
        return replace(base_setting, limits=limits)


OPEN = (
    Cell(H200, "plain", share=0.8),
    Cell(H200, "plain", share=0.8, little_memory=True),
    Cell(H200, "eagle, k = 3", share=0.5),
    Cell(H200, "ours", share=0.5),
    Cell(H200, "ours", share=0.8),
    Cell(H200, "ours", share=0.8, little_memory=True),
)
CLOSED = (
    Cell(H200, "ours", clients=1),
    Cell(H200, "ours", clients=8),
    Cell(H200, "lookup, k = 3", clients=32),
    Cell(H200_HALF, "ours", clients=128),
    Cell(A100, "draft, k = 5", clients=8),
    Cell(A100, "ours", clients=8),
)


def cells() -> Iterator[Cell]:
    """Yield closed loads of 1 to 128 requests and open ones, in both modes of scheduling."""
    for cell in (*CLOSED, *OPEN):
        if not cell.little_memory or cell.system == "plain":
            yield replace(cell, asynchronous=True)
    yield from (*CLOSED, *OPEN)
