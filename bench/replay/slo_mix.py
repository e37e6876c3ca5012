"""Bar 3: three classes, 60/20/20, at rising rates; admission and speculation are also measured alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from outrider_runtime.control.settings import SLOClass
from outrider_runtime.simulate.replay.workload import Lengths, Workload, draw_classes, open_load, poisson

from bench.replay.bars import Bar, best_on_means, low_quantile
from bench.replay.cells import Result, run
from bench.replay.settings import Case, System, baselines, case_recording, loop_system

SHARES = np.array([0.6, 0.2, 0.2])
TIGHTNESS = (("interactive", 1.6, 60.0), ("chat", 3.0, 120.0), ("batch", 20.0, 4000.0))
"""(class, TPOT, TTFT), in steps of plain decoding for one request."""
ATTAINED, MOST_MISSES, TTFT_FACTOR = 0.90, 0.5, 1.05
QUANTILES = (0.50, 0.99)
REQUESTS = 300
LENGTHS = Lengths(300, 128)
CANDIDATES = 2
"""Best baselines whose rates are searched in fine steps."""


@dataclass(frozen=True, slots=True)
class Attained:
    share: float
    """Share of requests that met their class's TPOT and TTFT."""
    result: Result


def classes(step_s: float) -> tuple[SLOClass, ...]:
    return tuple(SLOClass(name, tpot * step_s, ttft * step_s) for name, tpot, ttft in TIGHTNESS)


def load(case: Case, rate_per_s: float, seed: int) -> Workload:
    rng = np.random.default_rng([seed, 13])
    at_s = poisson(rate_per_s, REQUESTS, rng)
    return draw_classes(open_load(at_s, case_recording(case), case.group, rng, LENGTHS), SHARES, rng)


def attainment(result: Result, targets: Sequence[SLOClass]) -> float:
    tpot, ttft = (np.array([getattr(target, name) for target in targets]) for name in ("tpot_s", "ttft_s"))
    met = (result.tpot_s <= tpot[result.slo_class]) & (result.ttft_s <= ttft[result.slo_class])
    return float(met.mean())


@dataclass(frozen=True, slots=True)
class Mix:
    """A case with its classes and rates, which are shares of what plain decoding can serve."""

    case: Case
    step_s: float
    capacity_per_s: float
    coarse: tuple[float, ...]
    fine: float

    @property
    def targets(self) -> tuple[SLOClass, ...]:
        return classes(self.step_s)

    def measure(self, system: System, share: float, seeds: Iterable[int]) -> list[Attained]:
        rate = share * self.capacity_per_s
        results = [run(self.case, system, load(self.case, rate, seed), seed) for seed in seeds]
        return [Attained(attainment(result, self.targets), result) for result in results]

    def variants(self) -> Mapping[str, System]:
        """Return ours, ours without admission, and its admission without speculation."""
        targets = self.targets
        return {
            "ours": loop_system(classes=targets),
            "ours without admission": loop_system("ours without admission", classes=targets, admission=False),
            "admission alone": loop_system("admission alone", classes=targets, speculates=False),
        }


@dataclass(frozen=True, slots=True)
class Judged:
    mix: Mix
    curves: dict[str, list[float]]
    """Attainment at the coarse rates, by system."""
    base: str
    share: float
    """Lowest share of the capacity at which the best baseline attains less than 90%."""
    there: dict[str, list[Attained]]
    """Runs of the best baseline and of the variants at that share."""


def judge(mix: Mix, seeds: int, screening: int) -> Judged:
    others = baselines(mix.case)
    systems = {**others, **mix.variants()}
    curves = {
        name: [_mean(mix.measure(system, share, range(1))) for share in mix.coarse] for name, system in systems.items()
    }
    first = sorted(others, key=lambda name: -sum(curves[name]))[:CANDIDATES]
    base, share = _where_it_falls(mix, {name: others[name] for name in first}, curves, screening)
    chosen = {base: others[base], **mix.variants()}
    there = {name: mix.measure(system, share, range(seeds)) for name, system in chosen.items()}
    return Judged(mix, curves, base, share, there)


def _mean(runs: Sequence[Attained]) -> float:
    return float(np.mean([attained_run.share for attained_run in runs]))


def _where_it_falls(
    mix: Mix, systems: Mapping[str, System], curves: Mapping[str, Sequence[float]], screening: int
) -> tuple[str, float]:
    """Find the first rate, in fine steps, at which all `systems` attain less than 90%, and the best one there."""
    best = [max(curves[name][place] for name in systems) for place in range(len(mix.coarse))]
    below = next((place for place, share in enumerate(best) if share < ATTAINED), len(best) - 1)
    share = mix.coarse[max(0, below - 1)]
    while True:
        means = {name: [_mean(mix.measure(system, share, range(screening)))] for name, system in systems.items()}
        name = best_on_means(means)
        if means[name][0] < ATTAINED or share >= mix.coarse[-1]:
            return name, share
        share = round(share + mix.fine, 4)


def bars(judged: Judged) -> list[Bar]:
    mine, base = judged.there["ours"], judged.there[judged.base]
    where = f"{judged.mix.case}, at {judged.share:.0%} of capacity"
    avoided = [1 - (1 - our_run.share) / max(1e-9, 1 - other.share) for our_run, other in zip(mine, base, strict=True)]
    verdict_bars = [
        Bar("3 SLO mix, misses avoided", where, low_quantile(avoided), 1 - MOST_MISSES, judged.base, len(mine))
    ]
    for number, target in enumerate(judged.mix.targets):
        for quantile in QUANTILES:
            ttft_s, theirs_s = (_ttft(side, number, quantile) for side in (mine, base))
            limit = max(TTFT_FACTOR * theirs_s, target.ttft_s or 0.0)
            name = f"3 SLO mix, TTFT p{100 * quantile:.0f} of {target.name}"
            verdict_bars.append(Bar(name, where, limit / ttft_s, 1.0, judged.base, len(mine)))
    return verdict_bars


def _ttft(runs: Sequence[Attained], number: int, quantile: float) -> float:
    """Return a quantile of the TTFT in seconds, over the requests of all seeds."""
    return float(
        np.quantile(
            np.concatenate(
                [attained_run.result.ttft_s[attained_run.result.slo_class == number] for attained_run in runs]
            ),
            quantile,
        )
    )


def document(judged: Judged) -> dict[str, object]:
    """Make the part of the results: attainment of each system, and waiting time of each class."""
    return {
        "world": judged.mix.case.world,
        "rates": list(judged.mix.coarse),
        "attained": judged.curves,
        "base": judged.base,
        "share": judged.share,
        "there": {
            name: {
                "attained": [round(attained_run.share, 4) for attained_run in runs],
                "ttftMs": {
                    target.name: [round(1e3 * _ttft(runs, number, quantile), 1) for quantile in QUANTILES]
                    for number, target in enumerate(judged.mix.targets)
                },
            }
            for name, runs in judged.there.items()
        },
    }
