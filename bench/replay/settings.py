"""The worlds, the recordings and the policies that are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.settings import Drafter, HotSettings, Settings, SLOClass
from outrider_runtime.control.step_times import LatencyModel
from outrider_runtime.loop.waiting import patience_s
from outrider_runtime.simulate import recording as recordings
from outrider_runtime.simulate import service_manifest
from outrider_runtime.simulate.recording import Recording
from outrider_runtime.simulate.replay.engine import Policy, Setting
from outrider_runtime.simulate.replay.fitted_profile import LONGEST_REQUEST, fit_profile
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.step_scheduler import Limits
from outrider_runtime.simulate.worlds import world as worlds

from bench.host_costs import added_us
from bench.replay.adaptive import Adaptive, cost_tables
from bench.replay.baselines import ByBatchSize, tuned_table
from bench.replay.synthetic import MIXES, draw_by_category

LONGEST = 5
"""Most draft tokens of every policy."""
MOST_REQUESTS = 256
"""max_num_seqs."""
SLOTS = Limits(max_requests=MOST_REQUESTS).slots
STATIC = (1, 2, 3, 5)
BLOCK = "block"
BLOCK_TOKENS = 4
"""Proposals of the recorded block head."""
PROFILES = 4
"""Number of noisy profiles; the seeds take them in turn."""
TRAITS = service_manifest.TRAITS | {
    "sparse": replace(service_manifest.TRAITS["sparse"], kv_budget=512),
    BLOCK: replace(service_manifest.BLOCK, most_tokens=BLOCK_TOKENS),
}
POOLS = {
    "llama-3.1-8b-h200": ("eagle", "lookup"),
    "llama-3.1-8b-h100": ("eagle", "lookup"),
    "llama-3.1-8b-a100": ("draft", "lookup"),
    "llama-3.1-8b-l40s": ("eagle", "lookup"),
    "llama-3.1-70b-4xh100": ("eagle", "lookup"),
    "llama-3.1-8b-8xa100-long": ("sparse", "lookup"),
    "smollm2-135m-cpu": ("eagle", "lookup"),
}
"""The pool of each world; a tie goes to the first."""
VARLEN_GRAPHS = frozenset(("llama-3.1-8b-h200", "llama-3.1-8b-h100", "llama-3.1-70b-4xh100"))
"""Worlds with FlashAttention 3: vLLM's adaptive verification runs nowhere else."""


@dataclass(frozen=True, slots=True)
class Case:
    """World, recording and pool, which are the same for every policy."""

    world: str
    acceptance: float | None = None
    """Lifted to this, or None: as recorded."""
    group: str | None = None
    mix: str | None = None
    """Name in `synthetic.MIXES`, which replaces the world's pool and a lifted acceptance."""
    drafters: tuple[str, ...] | None = None
    """The pool; None: the world's own."""

    def __str__(self) -> str:
        lift = "as recorded" if self.acceptance is None else f"lifted to {self.acceptance}"
        return f"{self.world}, {self.group or 'all prompts'}, {self.mix or lift}"


@cache
def recording(acceptance: float | None = None, mix: str | None = None, *, block: bool = False) -> Recording:
    """Load a recording. block: the one that has a block head."""
    real = recordings.load_shipped_with_block_head() if block else recordings.load_shipped()
    if mix is not None:
        return draw_by_category(real, MIXES[mix], seed=0)
    return real if acceptance is None else recordings.lift(real, acceptance, seed=0)


def case_recording(case: Case) -> Recording:
    return recording(case.acceptance, case.mix, block=BLOCK in (case.drafters or ()))


@cache
def world(name: str) -> worlds.World:
    """Load a world; a composed one gets a block head, too, made from its EAGLE head."""
    loaded = worlds.load(name)
    eagle = loaded.drafters.get("eagle")
    if not isinstance(eagle, worlds.Passes):
        return loaded
    return replace(loaded, drafters={**loaded.drafters, BLOCK: worlds.BlockPass(eagle, BLOCK_TOKENS)})


def pool(case: Case) -> tuple[Drafter, ...]:
    names = case.drafters or (POOLS[case.world] if case.mix is None else MIXES[case.mix].pool)
    return tuple(TRAITS[name] for name in names)


@cache
def profile(name: str, drafters: tuple[Drafter, ...], seed: int, longest: int = LONGEST_REQUEST) -> LatencyModel:
    return fit_profile(world(name), drafters, np.random.default_rng([seed, 7]), longest)


@dataclass(frozen=True, slots=True)
class System:
    """A named policy; `build` makes a new one for a case and a seed."""

    name: str
    build: Callable[[Case, int], Policy]
    loop: bool = False
    """Whether it is the loop as in vLLM: decisions take time, and drafters' confidences do not reach it."""
    patience_s: tuple[float, ...] = ()
    """Patience of each SLO class, for a policy that admits requests by deadline."""


def setting(case: Case, system: System) -> Setting:
    hardware = world(case.world)
    limits = Limits(max_requests=MOST_REQUESTS, kv_tokens=hardware.kv_tokens)
    cost = added_us([drafter.name for drafter in pool(case)]) if system.loop else ((1, 0.0),)
    return Setting(
        hardware, case_recording(case), pool(case), limits, cost, _asynchronous(case), device_ranks(case),
        system.patience_s,
        not system.loop,
    )  # fmt: skip


def device_ranks(case: Case) -> bool:
    """Whether attention takes any lengths: FlashAttention 3, and vLLM's on CPUs."""
    return world(case.world).takes_any_lengths


def _asynchronous(case: Case) -> bool:
    """Whether vLLM schedules asynchronously there, as on GPUs."""
    return not case.world.endswith("cpu")


Distort = Callable[[LatencyModel], LatencyModel]


def loop_system(
    name: str = "ours", *, classes: tuple[SLOClass, ...] = (), admission: bool = True, speculates: bool = True,
    distort: Distort | None = None,
) -> System:  # fmt: skip
    def build(case: Case, seed: int) -> Policy:
        latency = profile(case.world, pool(case), seed % PROFILES)
        most = LONGEST if speculates else 0
        hot = HotSettings(max_draft_tokens=most, slo_classes=classes, admission=admission)
        settings = Settings(
            pool(case), LONGEST, SLOTS, largest_graph_tokens=world(case.world).graph_tokens, hot=hot,
            scores_placeholders=_asynchronous(case), device_ranks=device_ranks(case),
        )  # fmt: skip
        rng = np.random.default_rng([seed, 2])
        model = distort(latency) if distort else latency
        return Controller(settings, model, clock=time.perf_counter, rng=rng)

    return System(name, build, loop=True, patience_s=tuple(map(patience_s, classes)))


def plain_decoding() -> System:
    return System("plain", lambda case, _: Fixed(pool(case)))


def statics(case: Case, lengths: Sequence[int] = STATIC) -> list[System]:
    """Return every drafter at every length; a length above a block drafter's block becomes the block."""
    return [
        _static(number, drafter.name, k)
        for number, drafter in enumerate(pool(case))
        for k in dict.fromkeys(k if drafter.most_tokens is None else min(k, drafter.most_tokens) for k in lengths)
    ]


def _static(number: int, name: str, k: int) -> System:
    return System(f"{name}, k = {k}", lambda case, _: Fixed(pool(case), number, k))


def batch_size_table() -> System:
    return System("table by batch size", lambda case, _: ByBatchSize(pool(case), 0, _table(case)))


@cache
def _table(case: Case) -> list[int]:
    return tuned_table(world(case.world), case_recording(case), pool(case)[0].name, LONGEST)


def adaptive_verification() -> System:
    def build(case: Case, _: int) -> Policy:
        costs = cost_tables(world(case.world), pool(case)[0].name, LONGEST, MOST_REQUESTS)
        return Adaptive(pool(case), 0, LONGEST, costs, SLOTS)

    return System("adaptive verification", build)


def singles(case: Case) -> Mapping[str, System]:
    """Return the settings that never change: no speculation, and every drafter at every length."""
    return {system.name: system for system in (plain_decoding(), *statics(case))}


def baselines(case: Case) -> Mapping[str, System]:
    further = [batch_size_table(), adaptive_verification()] if case.world in VARLEN_GRAPHS else [batch_size_table()]
    return {**singles(case), **{system.name: system for system in further}}
