"""Bar 3: three classes, 60/20/20, at rising rates. What admission gives and what speculation gives are shown apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from outrider_runtime.core.settings import SLOClass
from outrider_runtime.simulate.replay.workload import Lengths, Workload, open_load, poisson, with_classes

from tests.benchmarks.replay.bars import Bar
from tests.benchmarks.replay.cells import Result, run
from tests.benchmarks.replay.settings import Case, System, others, ours, recording

SHARES = np.array([0.6, 0.2, 0.2])
TIGHTNESS = (("interactive", 1.6, 60.0), ("chat", 3.0, 120.0), ("batch", 20.0, 4000.0))
"""TPOT and TTFT of a class, in steps of plain decoding for one request."""
ATTAINED, MOST_MISSES, TTFT_FACTOR = 0.90, 0.5, 1.05
REQUESTS = 300
LENGTHS = Lengths(300, 128)


@dataclass(frozen=True, slots=True)
class Attained:
    rate_per_s: float
    share: float
    """Of requests that met their class's TPOT and TTFT."""
    result: Result


def classes(step_s: float) -> tuple[SLOClass, ...]:
    return tuple(SLOClass(name, tpot * step_s, ttft * step_s) for name, tpot, ttft in TIGHTNESS)


def load(case: Case, rate_per_s: float, seed: int) -> Workload:
    rng = np.random.default_rng([seed, 13])
    at_s = poisson(rate_per_s, REQUESTS, rng)
    return with_classes(open_load(at_s, recording(case.acceptance), case.group, rng, LENGTHS), SHARES, rng)


def attained(result: Result, targets: Sequence[SLOClass]) -> float:
    tpot, ttft = (np.array([getattr(one, name) for one in targets]) for name in ("tpot_s", "ttft_s"))
    met = (result.tpot_s <= tpot[result.slo_class]) & (result.ttft_s <= ttft[result.slo_class])
    return float(met.mean())


def curve(
    case: Case, system: System, targets: Sequence[SLOClass], rates: Sequence[float], seeds: int
) -> list[list[Attained]]:
    """By rate, then by seed."""
    found = []
    for rate in rates:
        results = [run(case, system, load(case, rate, seed), seed) for seed in range(seeds)]
        found.append([Attained(rate, attained(one, targets), one) for one in results])
    return found


def variants(targets: tuple[SLOClass, ...]) -> dict[str, Callable[[], System]]:
    """Ours whole, without admission, and its admission without speculation."""
    return {
        "ours": lambda: ours(classes=targets),
        "ours without admission": lambda: ours("ours without admission", classes=targets, admission=False),
        "admission alone": lambda: ours("admission alone", classes=targets, speculates=False),
    }


def judge(case: Case, step_s: float, rates: Sequence[float], seeds: int) -> tuple[list[Bar], dict[str, list[float]]]:
    """The bars, and every system's attainment by rate."""
    targets = classes(step_s)
    systems = {**others(case), **{name: build() for name, build in variants(targets).items()}}
    curves = {name: curve(case, one, targets, rates, seeds) for name, one in systems.items()}
    means = {name: [float(np.mean([one.share for one in at])) for at in found] for name, found in curves.items()}
    base = max(others(case), key=lambda name: sum(means[name]))
    below = next((place for place, share in enumerate(means[base]) if share < ATTAINED), len(rates) - 1)
    where = f"{case}, {rates[below]:.1f} requests a second"
    pairs = list(zip(curves["ours"][below], curves[base][below], strict=True))
    misses = float(np.mean([1 - mine.share for mine, _ in pairs])) / max(1e-9, 1 - means[base][below])
    found = [Bar("3 SLO mix, misses avoided", where, 1 - misses, 1 - MOST_MISSES, base, seeds)]
    return found + _ttft(where, base, pairs, targets, seeds), means


def _ttft(
    where: str, base: str, pairs: Sequence[tuple[Attained, Attained]], targets: Sequence[SLOClass], seeds: int
) -> list[Bar]:
    """p50 and p99 of each class: at most 1.05 of the baseline's, or inside the class's own."""
    found = []
    for number, target in enumerate(targets):
        for quantile in (0.50, 0.99):
            mine, theirs = (
                float(np.quantile(np.concatenate([_of(one, number) for one in side]), quantile))
                for side in zip(*pairs, strict=True)
            )
            limit = max(TTFT_FACTOR * theirs, target.ttft_s or 0.0)
            name = f"3 SLO mix, TTFT p{quantile:.0%} of {target.name}".replace("%", "")
            found.append(Bar(name, where, limit / mine, 1.0, base, seeds))
    return found


def _of(one: Attained, number: int) -> np.ndarray:
    return np.asarray(one.result.ttft_s[one.result.slo_class == number])
