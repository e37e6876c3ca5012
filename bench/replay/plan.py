"""What `make bench` measures, the most important first. Sizes keep a whole run below 8,000 cells."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from outrider_runtime.simulate.worlds.world import Pass

from bench.replay.phases import Phase, Shift
from bench.replay.settings import POOLS, Case, world
from bench.replay.slo_mix import Mix
from bench.replay.static_load import Point

LIFTED = (0.5, 0.7, 0.9)
GROUPS = ("chat", "reasoning", "reading")
TOKENS = 128
"""Tokens of an answer."""
SHIFTED = ("llama-3.1-8b-h200", "llama-3.1-8b-a100")
WORLDS = tuple(name for name in POOLS if name != "llama-3.1-8b-h100")
"""Worlds of the bars. An H100 has the steps of an H200 with slower memory, so it is left out."""
MIXED = (("a lookup suits reading", "llama-3.1-8b-h200"), ("two models suit one group each", "llama-3.1-70b-4xh100"))
TRACE = Path(__file__).parents[1] / "data" / "azure_code_2023.csv"


@dataclass(frozen=True, slots=True)
class Size:
    seeds: int
    """Seeds of ours and of the policies that it is compared with."""
    screening: int
    """Seeds with which the best of the other policies are chosen."""
    fewer: int
    """Replaces `seeds` for a cell that takes long, or a bar that needs many."""
    batches: tuple[int, ...]
    worlds: tuple[str, ...] = WORLDS


DEFAULT = Size(seeds=20, screening=3, fewer=8, batches=(1, 8, 32, 128))
QUICK = Size(seeds=3, screening=2, fewer=2, batches=(8, 128), worlds=SHIFTED)


# -- static load ------------------------------------------------------------------------------------------------------


def points(size: Size) -> list[Point]:
    """Return every world at every batch, lifted to the acceptances in turn; then as recorded, the groups in turn."""
    lifted = [
        Point(Case(name, LIFTED[(number + place) % len(LIFTED)]), requests)
        for number, name in enumerate(size.worlds)
        for place, requests in enumerate(size.batches)
        if fits(name, requests)
    ]
    groups = cycle(GROUPS)
    real = [
        Point(Case(name, None, next(groups)), requests)
        for name in size.worlds
        for requests in size.batches[::2]
        if fits(name, requests)
    ]
    return lifted + real


def fits(name: str, requests: int) -> bool:
    """Whether the world has rows for so many requests (long contexts begin at 32, a CPU ends there) and the memory."""
    if name.endswith("long"):
        return requests >= 32
    if name.endswith("cpu"):
        return requests <= 32
    return requests * 600 <= world(name).kv_tokens


def wrong_points(size: Size) -> list[Point]:
    return [Point(Case(name, 0.7), requests) for name in SHIFTED for requests in (size.batches[1], size.batches[-1])]


# -- what shifts ------------------------------------------------------------------------------------------------------

PHASE_STEPS = 600
"""Length of a phase in steps of plain decoding of 32 requests: 6 s at 10 ms per step."""
LOADS = (0.15, 0.4, 0.7, 1.0, 0.7, 0.4, 0.15)
"""Shares of what plain decoding can serve."""
STEADY = 0.3
BURST, IDLE_REQUESTS = 192, 24
WINDOWS, WINDOW_STEPS, OF_CAPACITY, LONGEST_GAP_S = 6, 600, 0.5, 5.0
"""Windows, steps of a window, load and longest gap of the trace."""


def changing_loads() -> list[Shift]:
    """Return the loads that change: up and down, bursts, the trace's arrivals, other prompts."""
    h200, a100, l40s, large = SHIFTED[0], SHIFTED[1], "llama-3.1-8b-l40s", "llama-3.1-70b-4xh100"
    rising = [
        rise(Case(name, acceptance)) for name, acceptance in ((h200, 0.7), (a100, 0.7), (l40s, 0.5), (large, 0.5))
    ]
    bursts = [burst(Case(a100, 0.9, drafters=("draft",))), burst(Case(h200, 0.7))]
    prompts = [prompt_groups(Case(name, None)) for name in SHIFTED]
    return [*rising, *bursts, *prompts, *(trace(name, 0.7) for name in SHIFTED)]


def rise(case: Case) -> Shift:
    full, seconds = capacity(case.world), PHASE_STEPS * step_s(case.world, 32)
    rising = tuple(Phase(seconds, share * full, overloaded=share >= 1) for share in LOADS)
    return Shift("load goes up and comes back", case, rising)


def prompt_groups(case: Case) -> Shift:
    rate, seconds = STEADY * capacity(case.world), 2 * PHASE_STEPS * step_s(case.world, 32)
    return Shift("prompts change", case, tuple(Phase(seconds, rate, group) for group in GROUPS))


def burst(case: Case) -> Shift:
    """A few requests, one after the other; then many at once."""
    seconds = IDLE_REQUESTS * TOKENS * step_s(case.world, 1)
    few = np.arange(IDLE_REQUESTS) * seconds / IDLE_REQUESTS
    phases = (Phase(seconds, IDLE_REQUESTS / seconds), Phase(1.0, BURST, overloaded=True))
    return Shift("burst out of idleness", case, phases, (*few.tolist(), *[seconds] * BURST))


def trace(name: str, acceptance: float) -> Shift:
    """Scale the arrivals of Azure's trace to half of the capacity; each phase has the same number of requests."""
    full, seconds = capacity(name), WINDOWS * WINDOW_STEPS * step_s(name, 32)
    window_requests = round(seconds * OF_CAPACITY * full / WINDOWS)
    at_s = _trace(WINDOWS * window_requests + 1)
    at_s *= seconds / at_s[-1]
    windows = np.diff(at_s[::window_requests])
    windows_as_phases = tuple(
        Phase(float(window), window_requests / float(window), overloaded=bool(window_requests / window >= full))
        for window in windows
    )
    return Shift("arrivals of the Azure trace", Case(name, acceptance), windows_as_phases, tuple(at_s[:-1].tolist()))


def _trace(count: int) -> NDArray[np.float64]:
    """Return the first arrivals. Gaps are cut to LONGEST_GAP_S: an idle engine shows nothing."""
    at_s = np.loadtxt(TRACE, skiprows=1)[:count]
    return np.concatenate([[0.0], np.minimum(np.diff(at_s), LONGEST_GAP_S).cumsum()])


def capacity(name: str, requests: int = 128, prompt: int = 300) -> float:
    """Return the requests/s that plain decoding finishes with so many at a time, prefill included."""
    hardware = world(name)
    reading_s = hardware.target_s(Pass(prompt + requests, requests, 400, requests + 1, ((prompt, 0),)))
    decoding_s = step_s(name, requests)
    return 1 / (TOKENS * decoding_s / requests + reading_s - decoding_s)


def step_s(name: str, requests: int) -> float:
    """Return the step time of plain decoding."""
    return world(name).target_s(Pass(requests, requests, 400, requests))


# -- the others -------------------------------------------------------------------------------------------------------


def mixes(size: Size) -> list[Mix]:
    """Return the SLO mixes, at rates from half of the capacity up."""
    coarse = tuple(round(0.5 + 0.15 * step, 2) for step in range(6))
    return [
        Mix(Case(name, 0.7), step_s(name, 1), capacity(name), coarse, 0.05) for name in SHIFTED if name in size.worlds
    ]


def pools() -> list[tuple[Case, int]]:
    """Return pools on mixed prompts: synthetic ones at several batches, and the recorded one."""
    cases = [(Case(name, mix=mix), requests) for mix, name in MIXED for requests in (2, 8, 32)]
    return cases + [(Case(name), 8) for name in SHIFTED]


def block_pools() -> list[tuple[Case, int]]:
    """Return pools with the recorded block head, as recorded and lifted to what a larger target accepts."""
    names = ("block", "eagle", "lookup")
    return [
        (Case(world, acceptance, drafters=names), requests)
        for world in ("llama-3.1-8b-h200", "llama-3.1-8b-l40s")
        for acceptance in (None, 0.7)
        for requests in (2, 8, 32)
    ]
