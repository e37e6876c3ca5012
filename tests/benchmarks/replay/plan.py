"""What `make bench-replay` measures, in order of what a reader asks first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

from outrider_runtime.simulate.worlds.world import Pass

from tests.benchmarks.replay.phases import Phase, Shift
from tests.benchmarks.replay.settings import POOLS, Case, world
from tests.benchmarks.replay.static_load import Point

BATCHES = (1, 8, 32, 128)
LIFTED = (0.5, 0.9, 0.7)
GROUPS = ("chat", "reasoning", "reading")


@dataclass(frozen=True, slots=True)
class Size:
    seeds: int
    screening: int
    """Seeds with which the best static setting is found."""
    batches: tuple[int, ...]


DEFAULT = Size(20, 3, BATCHES)
QUICK = Size(3, 2, (1, 128))


def points(size: Size) -> list[Point]:
    """Every world at every batch, lifted to each acceptance in turn; then as recorded, a group in turn."""
    groups = cycle(GROUPS)
    lifted = [
        Point(Case(name, acceptance), requests)
        for acceptance in LIFTED[:2]
        for name in POOLS
        for requests in size.batches
        if fits(name, requests)
    ]
    real = [
        Point(Case(name, None, next(groups)), requests)
        for name in POOLS
        for requests in (1, 32)
        if fits(name, requests)
    ]
    return lifted + real


def fits(name: str, requests: int) -> bool:
    """Rows of long contexts begin at 32 requests; memory holds no more than the world says."""
    if name.endswith("long"):
        return requests >= 32
    return requests * 600 <= world(name).kv_tokens


def wrong_points(size: Size) -> list[Point]:
    return [
        Point(Case(name, 0.7), requests)
        for name in ("llama-3.1-8b-h100", "llama-3.1-8b-a100")
        for requests in size.batches
    ]


def shifts() -> list[Shift]:
    """Rates are shares of what plain decoding of 128 requests yields."""
    found = []
    for name in ("llama-3.1-8b-h200", "llama-3.1-8b-a100"):
        full = capacity(name)
        case = Case(name, 0.7)
        found.append(
            Shift(
                "load goes up and comes back",
                case,
                tuple(Phase(8.0, share * full) for share in (0.05, 0.6, 0.1, 0.8, 0.05)),
            )
        )
        recorded = Case(name, None)
        found.append(Shift("prompts change", recorded, tuple(Phase(10.0, 0.15 * full, group) for group in GROUPS)))
    return found


def capacity(name: str, tokens: int = 128, requests: int = 128) -> float:
    """Requests a second that plain decoding finishes with so many at a time."""
    step_s = world(name).target_s(Pass(requests, requests, 400, requests))
    return requests / step_s / tokens


def plain_step_s(name: str) -> float:
    """Of one request alone."""
    return world(name).target_s(Pass(1, 1, 400, 1))


def rates(name: str) -> list[float]:
    """Steps of 5% of plain capacity."""
    return [capacity(name) * (0.7 + 0.05 * step) for step in range(8)]
