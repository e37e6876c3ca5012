"""Compares Outrider's policy with others on the same requests: one row of figures for each policy and rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.controller import Controller
from outrider_runtime.control.settings import Settings
from outrider_runtime.loop.waiting import patience_s
from outrider_runtime.simulate.replay.engine import Policy, ReplayEngine, Setting
from outrider_runtime.simulate.replay.fitted_profile import LONGEST_REQUEST, fit_profile
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.workload import Workload
from outrider_runtime.simulate.simulated_deployment import Deployment

OURS, PLAIN = "outrider", "plain"
STATIC_LENGTHS = (1, 3, 5)  # draft lengths of --compare
GAIN = 1.02
"""A smaller speed-up counts as none."""
Policies = Mapping[str, Callable[[], Policy]]


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Figures of one policy at one rate; times in seconds."""

    policy: str
    rate_per_s: float
    requests: int
    goodput: float
    """Tokens/s."""
    latency_s: float
    """Mean time from arrival to the last token."""
    speedup: float
    """Mean latency of plain decoding / mean latency of this policy (higher is better)."""
    ttft_s: float
    """Mean time to first token."""
    tpot_p50_s: float
    tpot_p99_s: float
    verified: float
    """Mean number of verified proposals per request and step."""
    attained: tuple[float | None, ...]
    """Share of requests that met their SLO, by class; None: the class had no request."""


def policies(deployment: Deployment, seed: int, *, statics: bool) -> Policies:
    """Make Outrider's policy and plain decoding; with `statics` also each drafter at fixed lengths."""
    drafters, most = deployment.drafters, deployment.service.hot.max_draft_tokens
    by_name: dict[str, Callable[[], Policy]] = {OURS: _controller(deployment, seed), PLAIN: lambda: Fixed(drafters)}
    for number, drafter in enumerate(drafters if statics else ()):
        for k in STATIC_LENGTHS:
            if k <= most:
                by_name[f"{drafter.name}, k = {k}"] = _static(deployment, number, k)
    return by_name


def _static(deployment: Deployment, drafter: int, k: int) -> Callable[[], Policy]:
    return lambda: Fixed(deployment.drafters, drafter, k)


def _controller(deployment: Deployment, seed: int) -> Callable[[], Policy]:
    """Make the controller as a pod does: with a noisy profile of this hardware, or without one."""
    hot, world = deployment.service.hot, deployment.world
    longest, rng = deployment.service.longest_request or LONGEST_REQUEST, np.random.default_rng([seed, 0])
    noisy = None if deployment.service.learns else fit_profile(world, deployment.drafters, rng, longest)
    settings = Settings(
        deployment.drafters, hot.max_draft_tokens, deployment.limits.slots,
        largest_graph_tokens=world.graph_tokens, hot=hot, scores_placeholders=True,
        device_ranks=world.takes_any_lengths,
    )  # fmt: skip
    return lambda: Controller(settings, noisy, clock=time.perf_counter, rng=np.random.default_rng([seed, 1]))


def compare_policies(
    deployment: Deployment, load: Workload, rate_per_s: float, policies: Policies
) -> Iterator[PolicyFigures]:
    """Run all policies on one load; yields their figures in order."""
    engines = {name: _run(_setting(deployment, name), load, build()) for name, build in policies.items()}
    plain_s = _latency_s(engines[PLAIN])
    for name, engine in engines.items():
        yield _figures(deployment, name, rate_per_s, engine, plain_s)


def _setting(deployment: Deployment, policy: str) -> Setting:
    """Make the setting: Outrider admits requests by deadline, the other policies first come, first served."""
    classes = deployment.service.hot.slo_classes if policy == OURS else ()
    patience = tuple(patience_s(slo_class) for slo_class in classes)
    return Setting(
        deployment.world, deployment.recording, deployment.drafters, deployment.limits, patience_s=patience,
        confidences=policy != OURS, device_ranks=deployment.world.takes_any_lengths,
    )  # fmt: skip


def _run(setting: Setting, load: Workload, policy: Policy) -> ReplayEngine:
    engine = ReplayEngine(setting, load, policy)
    engine.run()
    return engine


def _latency_s(engine: ReplayEngine) -> float:
    return float((engine.requests.done_s - engine.requests.arrived_s).mean())


def _figures(
    deployment: Deployment, name: str, rate_per_s: float, engine: ReplayEngine, plain_s: float
) -> PolicyFigures:
    requests, load, log = engine.requests, engine.requests.load, engine.log
    ttft_s = requests.first_s - requests.arrived_s
    tpot_s = (requests.done_s - requests.first_s) / np.maximum(1, load.output - 1)
    classes = deployment.service.hot.slo_classes
    met = [(tpot_s <= slo.tpot_s) & (ttft_s <= (slo.ttft_s or np.inf)) for slo in classes]
    return PolicyFigures(
        policy=name,
        rate_per_s=rate_per_s,
        requests=len(load),
        goodput=sum(log.tokens) / engine.now,
        latency_s=_latency_s(engine),
        speedup=plain_s / _latency_s(engine),
        ttft_s=float(ttft_s.mean()),
        tpot_p50_s=float(np.percentile(tpot_s, 50)),
        tpot_p99_s=float(np.percentile(tpot_s, 99)),
        verified=sum(log.verified) / max(1, sum(log.requests)),
        attained=tuple(_share(good[load.slo_class == number]) for number, good in enumerate(met)),
    )


def _share(met: NDArray[np.bool_]) -> float | None:
    return float(met.mean()) if len(met) else None


def crossover(figures: Sequence[PolicyFigures]) -> str:
    """Return the rate at which speculation stops to pay, in a sentence."""
    ours = [row for row in figures if row.policy == OURS]
    pays = [row.rate_per_s for row in ours if row.speedup >= GAIN]
    after = next((row.rate_per_s for row in ours if row.rate_per_s > max(pays, default=0.0)), None)
    if after is None:
        return f"Speculation pays at every rate up to {ours[-1].rate_per_s:.3g} requests a second."
    return f"From {after:.3g} requests a second on, speculation gains less than {GAIN - 1:.0%} over plain decoding."
