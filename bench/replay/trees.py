"""Trees and chains in the bundled engine: one EAGLE-3 head, recorded with its beams."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter, HotSettings, Settings, SLOClass
from outrider_runtime.simulate.recording import WIDTH
from outrider_runtime.simulate.replay.engine import Policy, ReplayEngine, Setting
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.step_scheduler import Limits
from outrider_runtime.simulate.replay.workload import Workload

from bench.host_costs import added_us
from bench.replay.settings import MOST_REQUESTS, PROFILES, SLOTS, profile, recording, world
from bench.replay.tree_baselines import AdaServe, StaticTree

DEEPEST = 8
CHAINS = Drafter("eagle", passes=True, needs_hidden=True)
TREES = dataclasses.replace(CHAINS, widest=WIDTH)


@dataclass(frozen=True, slots=True)
class Place:
    """A world, and the acceptance that the head is lifted to; None: as recorded."""

    world: str
    acceptance: float | None

    def __str__(self) -> str:
        return f"{self.world}, {'as recorded' if self.acceptance is None else f'lifted to {self.acceptance}'}"


Classes = tuple[SLOClass, ...]


@dataclass(frozen=True, slots=True)
class System:
    name: str
    build: Callable[[Place, int, Classes], Policy]
    decides: bool = False
    """Whether its decisions take time. The bundled engine schedules synchronously, so nothing hides that."""


def loop_system(name: str, drafter: Drafter, *, admission: bool = False) -> System:
    def build(place: Place, seed: int, classes: Classes) -> Policy:
        hot = HotSettings(max_draft_tokens=DEEPEST, slo_classes=classes, admission=admission)
        hardware = world(place.world)
        settings = Settings((drafter,), DEEPEST, SLOTS, largest_graph_tokens=hardware.graph_tokens, hot=hot)
        latency = profile(place.world, (drafter,), seed % PROFILES)
        return Controller(settings, latency, clock=time.perf_counter, rng=np.random.default_rng([seed, 2]))

    return System(name, build, decides=True)


def plain_decoding() -> System:
    return System("plain", lambda *_: Fixed((CHAINS,)))


def chain(k: int) -> System:
    return System(f"chain, k = {k}", lambda *_: Fixed((CHAINS,), 0, k))


def specinfer() -> System:
    return System("SpecInfer's static tree", lambda *_: StaticTree(1, 0, WIDTH))


def adaserve() -> System:
    def build(place: Place, seed: int, classes: Classes) -> Policy:
        tpots_s = [slo_class.tpot_s for slo_class in classes]
        return AdaServe(1, 0, budget(place, seed), DEEPEST, WIDTH, tpots_s)

    return System("AdaServe as published", build)


def budget(place: Place, seed: int) -> int:
    """Return AdaServe's B: the knee of the profile, in tokens."""
    cost = profile(place.world, (CHAINS,), seed % PROFILES).target[ExecutionMode.VARLEN]
    return round(cost.knee_tokens)


def run(place: Place, system: System, load: Workload, seed: int, classes: Classes = ()) -> ReplayEngine:
    hardware = world(place.world)
    setting = Setting(
        hardware, recording(place.acceptance), (TREES,),
        Limits(max_requests=MOST_REQUESTS, kv_tokens=hardware.kv_tokens),
        added_us([TREES.name], "stepper_us") if system.decides else ((1, 0.0),),
        asynchronous=False, bundled=True,
    )  # fmt: skip
    engine = ReplayEngine(setting, load, system.build(place, seed, classes))
    engine.run()
    return engine


def tpot_s(engine: ReplayEngine) -> NDArray[np.float64]:
    """(requests,): TPOT of each request."""
    requests = engine.requests
    return np.asarray((requests.done_s - requests.first_s) / np.maximum(1, requests.load.output - 1))
