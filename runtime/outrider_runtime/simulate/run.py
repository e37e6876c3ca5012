"""One policy on one workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.settings import SLOTarget
from outrider_runtime.drafters import drafter_spec
from outrider_runtime.simulate.books import Finished, Request
from outrider_runtime.simulate.engine import Engine
from outrider_runtime.simulate.observer import BINS, Observer
from outrider_runtime.simulate.pod import Pod
from outrider_runtime.simulate.policies import PolicyChoice
from outrider_runtime.simulate.scheduling import Due
from outrider_runtime.simulate.summary import RunFigures, summarise
from outrider_runtime.simulate.truth import AcceptanceRule, AcceptanceRules, World
from outrider_runtime.simulate.workload import Source
from outrider_runtime.vllm_plugin.loop import hot_settings
from outrider_runtime.vllm_plugin.waiting import patience_s

NOISE = 0.03
"""Of the log of a step's time; the engine runs measured on a quiet machine vary by 2 to 3%."""
OVERHEAD_S = 2e-4
"""Of a step outside of target and draft: the scheduler's own work, the controller's decision included."""
LONGEST_CHAIN = 32


@dataclass(frozen=True, slots=True)
class Scenario:
    pod: Pod
    rules: tuple[AcceptanceRule, ...]
    """At least one for each of the pod's drafters, for all classes."""
    hit_rates: Mapping[str, float]
    source: Callable[[], Source]
    """The same requests each time it is called."""
    duration_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    figures: RunFigures
    observer: Observer
    finished: Sequence[Finished]


def simulate(scenario: Scenario, choice: PolicyChoice) -> Run:
    """Until every request is finished."""
    pod, ours = scenario.pod, choice.draft_tokens is None
    targets = hot_settings(pod.hot).slo_classes
    observer = Observer(bin_s=max(scenario.duration_s, 1e-3) / BINS)
    engine = Engine(
        _world(scenario), choice.controller(pod, scenario.seed), scenario.source(), pod.limits,
        np.random.default_rng([scenario.seed, 1]), listener=observer, due=_deadlines(targets) if ours else None,
    )  # fmt: skip
    engine.run()
    figures = summarise(choice.name, engine.finished, engine.refused, observer, engine.now, targets)
    return Run(figures, observer, engine.finished)


def _deadlines(targets: Sequence[SLOTarget]) -> Due | None:
    """As the plugin orders those that wait: by arrival and their class's patience, preempted ones first."""
    if not targets:
        return None
    patience = {target.name: patience_s(target) for target in targets}
    longest = max(patience.values())

    def due(request: Request) -> float:
        if request.preemptions:
            return -math.inf
        return request.arrival.at_s + patience.get(request.slo_class or "", longest)

    return due


def _world(scenario: Scenario) -> World:
    pod = scenario.pod
    neural = pod.neural
    return World(
        latency=pod.latency,
        path=AcceptanceRules(scenario.rules, LONGEST_CHAIN),
        hit_rate=scenario.hit_rates,
        neural=neural.name if neural else None,
        holes_matter=neural is not None and drafter_spec(neural).needs_whole_kv,
        largest_graph_tokens=pod.profile.largest_graph_tokens,
        noise=NOISE,
        overhead_s=OVERHEAD_S,
    )
