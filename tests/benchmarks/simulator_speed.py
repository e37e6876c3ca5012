"""How fast the simulator is: simulated tokens a minute, with the controller in the loop.

    python -m tests.benchmarks.simulator_speed

writes results/simulator_speed.json and .png. Bar: a million output tokens in a minute at a mean batch of 8 or more.
Each point runs `outrider-simulate`'s own code on Llama-3.1-8B with an EAGLE-3 head and prompt lookup, a fixed number of
requests at any time, until so many tokens have come out.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np
from outrider_runtime.simulate import profiles
from outrider_runtime.simulate.assumptions import read_acceptance
from outrider_runtime.simulate.pod import Pod, read_pod
from outrider_runtime.simulate.policies import NO_SPECULATION, OURS, PolicyChoice
from outrider_runtime.simulate.run import Scenario, simulate
from outrider_runtime.simulate.workload import Arrival, ClassMix, Lengths, Source

RESULTS = Path(__file__).parent / "results"
MANIFEST = Path(__file__).parents[2] / "examples" / "llama-h200.yaml"
PROFILE = "llama-3.1-8b-h100"
BAR_TOKENS_PER_MINUTE = 1_000_000
LENGTHS = Lengths(prompt_tokens=256, output_tokens=256)
POINTS = ((9, 1_000_000), (16, 500_000), (64, 500_000))
"""(requests at any time, output tokens); the first one is the bar's."""
WARM_UP_TOKENS = 5_000


@dataclass(frozen=True)
class Point:
    policy: str
    clients: int
    mean_batch: float
    tokens: int
    steps: int
    wall_s: float
    cpu_s: float
    tokens_per_minute: int
    microseconds_per_step: float


class Tokens(Source):
    """`clients` requests at any time, until the requests given out hold `tokens` output tokens."""

    def __init__(self, clients: int, tokens: int, mix: ClassMix, rng: np.random.Generator) -> None:
        self._clients, self._left, self._mix, self._rng = clients, tokens, mix, rng

    def due(self, now_s: float, active: int) -> list[Arrival]:
        arrivals: list[Arrival] = []
        while self._left > 0 and active + len(arrivals) < self._clients:
            arrivals.append(Arrival(now_s, *LENGTHS.draw(self._rng), self._mix.draw()))
            self._left -= arrivals[-1].output_tokens
        return arrivals

    def next_at_s(self) -> None:
        return None


def measure(pod: Pod, choice: PolicyChoice, clients: int, tokens: int) -> Point:
    def source() -> Source:
        rng = np.random.default_rng(0)
        return Tokens(clients, tokens, ClassMix({"interactive": 60, "batch": 40}, rng), rng)

    acceptance = read_acceptance(pod, [], [])
    scenario = Scenario(pod, acceptance.rules, acceptance.hit_rates, source, duration_s=60.0, seed=0)
    began, cpu = time.perf_counter(), time.process_time()
    figures = simulate(scenario, choice).figures
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return Point(
        policy=choice.name,
        clients=clients,
        mean_batch=round(figures.mean_batch, 2),
        tokens=figures.output_tokens,
        steps=figures.steps,
        wall_s=round(wall_s, 2),
        cpu_s=round(cpu_s, 2),
        tokens_per_minute=round(60 * figures.output_tokens / wall_s),
        microseconds_per_step=round(1e6 * wall_s / figures.steps, 1),
    )


def plot(points: list[Point], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for policy in dict.fromkeys(point.policy for point in points):
        own = [point for point in points if point.policy == policy]
        axes.plot([p.mean_batch for p in own], [p.tokens_per_minute for p in own], marker="o", label=policy)
    axes.axhline(BAR_TOKENS_PER_MINUTE, color="black", linewidth=0.8, linestyle=":", label="bar")
    axes.set(xscale="log", yscale="log", xlabel="mean batch", ylabel="simulated tokens a minute")
    axes.set_title("Speed of the simulator")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    pod = read_pod(MANIFEST, profiles.load(PROFILE))
    measure(pod, OURS, 8, WARM_UP_TOKENS)
    points = []
    for choice in (OURS, NO_SPECULATION):
        for clients, tokens in POINTS:
            points.append(measure(pod, choice, clients, tokens))
            print(points[-1], flush=True)
    first = points[0]
    document = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "profile": f"{pod.profile.name} ({pod.profile.label})",
        "bar": {"tokens_per_minute": BAR_TOKENS_PER_MINUTE, "at_mean_batch": 8},
        "met": first.tokens_per_minute >= BAR_TOKENS_PER_MINUTE and first.mean_batch >= 8,
        "points": [asdict(point) for point in points],
    }
    (RESULTS / "simulator_speed.json").write_text(json.dumps(document, indent=2) + "\n")
    plot(points, RESULTS / "simulator_speed.png")


if __name__ == "__main__":
    main()
