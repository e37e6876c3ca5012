"""Compare `outrider_demand_replicas` with the pods that a load takes in the replay.

    python -m bench.demand

writes results/demand.json and docs/images/demand.png (with matplotlib). A pod of examples/llama-h200.yaml runs in the
replay, with the loop and its noisy profile, at Poisson loads. Its capacity is the rate at which the replay's mean TPOT
passes the limit, interpolated between runs: a load of r requests/s takes r / capacity pods. The estimate is the
operator's own `capacity`, from the profile and the loop's counters over all steps of the run. If estimate / replayed
pods is above 1, the service scales up early. Without slopes, all time above the profile counts as the requests' own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from outrider_crds.counters import DrafterCounters
from outrider_crds.profile import ProfileExecutionMode, ProfileStepCost, TargetProfile
from outrider_crds.runtime_state import ServiceCounters
from outrider_operator.decide.figures.demand import Load, capacity, load_of
from outrider_operator.figure_windows import WindowCounts
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.state import ACCEPTED
from outrider_runtime.simulate import service_manifest
from outrider_runtime.simulate.comparison import OURS, policies
from outrider_runtime.simulate.load import LoadOptions, draw_poisson_load
from outrider_runtime.simulate.replay.engine import ReplayEngine, Setting
from outrider_runtime.simulate.replay.fitted_profile import REQUESTS, fit_profile
from outrider_runtime.simulate.replay.workload import Lengths
from outrider_runtime.simulate.simulated_deployment import Deployment, deploy, find_world

RESULTS = Path(__file__).parent / "results" / "demand.json"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "demand.png"
MANIFEST = Path(__file__).parents[1] / "examples" / "llama-h200.yaml"
SYSTEM = "h200_sxm"
LOADS = {
    Lengths(512, 256): (2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 36.0, 40.0, 48.0, 54.0, 60.0),
    Lengths(2000, 200): (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0),
}
"""Requests/s of each load; the second load has long prompts."""
TPOTS_MS = (5.0, 8.0, 12.0)
DURATION_S = 40.0


@dataclass(frozen=True)
class Point:
    prompt_tokens: int
    tpot_limit_ms: float
    rate_per_s: float
    replayed: float
    """Pods that the load takes in the replay."""
    estimate: float | None
    """Pods that the operator estimates; None if it gives no estimate."""
    without_slopes: float | None
    batch: float
    tpot_ms: float
    """The replay's mean TPOT."""


class Pod:
    """The replayed pod, and the profile that the operator has of it."""

    def __init__(self, seed: int) -> None:
        service = service_manifest.read(MANIFEST)
        self.deployment: Deployment = deploy(service, find_world(service, SYSTEM), {})
        self._seed = seed
        self._policy = policies(self.deployment, seed, statics=False)[OURS]
        self.profile = _profile(self.deployment, seed)

    def run(self, lengths: Lengths, rate_per_s: float) -> ReplayEngine:
        deployment = self.deployment
        options = LoadOptions(lengths, DURATION_S, {}, self._seed)
        setting = Setting(
            deployment.world, deployment.recording, deployment.drafters, deployment.limits, confidences=False,
            device_ranks=deployment.world.takes_any_lengths,
        )  # fmt: skip
        engine = ReplayEngine(setting, draw_poisson_load(deployment, options, rate_per_s), self._policy())
        engine.run()
        return engine


def _profile(deployment: Deployment, seed: int) -> TargetProfile:
    model = fit_profile(deployment.world, deployment.drafters, np.random.default_rng([seed, 0]))
    cost = ProfileStepCost(**asdict(model.target[ExecutionMode.UNIFORM]))
    return TargetProfile(
        key="ab", model=deployment.service.target, product=SYSTEM, costs={ProfileExecutionMode.UNIFORM: cost},
        error_percent=1.0, most_requests=max(REQUESTS), measured_at="2026-01-01T00:00:00Z",
    )  # fmt: skip


def mean_tpot_ms(engine: ReplayEngine) -> float:
    """Return the mean over requests of time from the first token / further tokens, in ms."""
    requests = engine.requests
    tpot_s = (requests.done_s - requests.first_s) / np.maximum(1, requests.load.output - 1)
    return 1000 * float(tpot_s.mean())


def window(engine: ReplayEngine) -> WindowCounts:
    """Return the counts that the operator would have of these steps."""
    assert isinstance(engine.policy, Controller)
    tally = engine.policy.state().tally
    counted = ServiceCounters(
        output_tokens=tally.output_tokens, draft_length_steps=tally.lengths.tolist(), steps=tally.steps,
        busy_s=tally.busy_s, batch_squared=tally.batch_squared, batch_accepted=tally.batch_accepted,
        batch_busy_s=tally.batch_busy_s, prompt_busy_s=tally.prompt_busy_s,
        drafters={"all": DrafterCounters(accepted=int(tally.of_drafter[:, ACCEPTED].sum()))},
    )  # fmt: skip
    return WindowCounts(engine.now, pods_answered=1, pods_ready=1, gained=counted, rare=counted)


def capacity_per_s(rates_per_s: Sequence[float], tpots_ms: Sequence[float], limit_ms: float) -> float | None:
    """Return the rate at which the mean TPOT passes the limit; None if no rate does, or already the first."""
    after = next((index for index, tpot_ms in enumerate(tpots_ms) if tpot_ms > limit_ms), 0)
    if not after:
        return None
    share = (limit_ms - tpots_ms[after - 1]) / (tpots_ms[after] - tpots_ms[after - 1])
    return rates_per_s[after - 1] + share * (rates_per_s[after] - rates_per_s[after - 1])


def points(profile: TargetProfile, lengths: Lengths, runs: Mapping[float, ReplayEngine]) -> Iterator[Point]:
    tpots_ms = [mean_tpot_ms(engine) for engine in runs.values()]
    for limit_ms in TPOTS_MS:
        most = capacity_per_s([*runs], tpots_ms, limit_ms)
        for (rate_per_s, engine), tpot_ms in zip(runs.items(), tpots_ms, strict=True):
            load = load_of(window(engine))
            if most is None or load is None:
                break
            yield Point(
                prompt_tokens=lengths.prompt,
                tpot_limit_ms=limit_ms,
                rate_per_s=rate_per_s,
                replayed=round(rate_per_s / most, 3),
                estimate=_replicas(profile, load, limit_ms),
                without_slopes=_replicas(profile, replace(load, slopes=None), limit_ms),
                batch=round(load.batch, 1),
                tpot_ms=round(tpot_ms, 2),
            )


def _replicas(profile: TargetProfile, load: Load, limit_ms: float) -> float | None:
    needed = capacity(profile, load, limit_ms / 1000)
    return None if needed is None else round(float(needed.replicas), 3)


def main() -> None:
    pod = Pod(seed=0)
    measured: list[Point] = []
    for lengths, rates_per_s in LOADS.items():
        runs = {}
        for rate_per_s in rates_per_s:
            runs[rate_per_s] = pod.run(lengths, rate_per_s)
            print(f"{lengths}, {rate_per_s:g}/s: mean TPOT {mean_tpot_ms(runs[rate_per_s]):.2f} ms", flush=True)
        measured += points(pod.profile, lengths, runs)
    for point in measured:
        print(point)
    RESULTS.write_text(json.dumps([asdict(point) for point in measured], indent=1) + "\n")
    _draw(measured)


def _draw(measured: list[Point]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 4))
    for (lengths, line), tpot_ms in itertools.product(zip(LOADS, ("o-", "x--"), strict=True), TPOTS_MS):
        drawn = [point for point in measured if _belongs_to(point, lengths, tpot_ms) and point.estimate is not None]
        replayed, estimates = [point.replayed for point in drawn], [point.estimate for point in drawn]
        axes.plot(replayed, estimates, line, label=f"TPOT {tpot_ms:g} ms, prompts of {lengths.prompt}")
    most = max(point.replayed for point in measured)
    axes.plot([0, most], [0, most], color="grey", linestyle=":", label="without error")
    axes.set_xlabel("replicas that the load takes, by the replay")
    axes.set_ylabel("outrider_demand_replicas")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=120)


def _belongs_to(point: Point, lengths: Lengths, tpot_ms: float) -> bool:
    return point.prompt_tokens == lengths.prompt and point.tpot_limit_ms == tpot_ms


if __name__ == "__main__":
    main()
