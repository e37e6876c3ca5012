"""The state that the stand-in reports: a steady, made-up load whose counters follow the clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from outrider_crds.runtime_config import BootConfig, HotConfig, config_hash
from outrider_crds.spec import SpeculationMode
from outrider_crds.state import (
    TPOT_BUCKETS_S,
    TTFT_BUCKETS_S,
    ChoiceState,
    DrafterState,
    Histogram,
    ProfileSource,
    ProfileState,
    RuntimeState,
    SLOClassState,
    SpeedupState,
)

WEIGHT_PER_S = 10_000.0
"""Of the probes: a second of load says 1% exactly."""
STEPS_PER_S = 20.0


@dataclass(frozen=True)
class Behaviour:
    """How the stand-in behaves, from STANDIN_* variables."""

    tokens_per_s: float = 0.0
    """Goodput; 0 is a service without traffic."""
    speedup: float = 1.5
    """Below 1 the choice is not to speculate."""
    attained_percent: float = 100.0
    """Share of requests that meet their class."""
    reckless: bool = False
    """Speculates even where that loses."""
    unloadable: str = ""
    """Name of a drafter that does not load."""
    start_s: float = 0.2
    """From start to ready; negative: never."""
    crash: bool = False
    answer: str = ""
    """How the state endpoint answers: "digits" (a counter of 400), "huge" (10^30 tokens), "endless", "halves" (in two
    parts with a pause); as it should when empty. With "real" the runtime's own server answers on that port."""

    @staticmethod
    def read(environment: Mapping[str, str]) -> Behaviour:
        def number(name: str, default: float) -> float:
            return float(environment.get(f"STANDIN_{name}", default))

        return Behaviour(
            tokens_per_s=number("TOKENS_PER_S", 0.0),
            speedup=number("SPEEDUP", 1.5),
            attained_percent=number("ATTAINED_PERCENT", 100.0),
            reckless="STANDIN_RECKLESS" in environment,
            unloadable=environment.get("STANDIN_UNLOADABLE", ""),
            start_s=number("START_S", 0.2),
            crash="STANDIN_CRASH" in environment,
            answer=environment.get("STANDIN_ANSWER", ""),
        )


def runtime_state(
    boot: BootConfig,
    hot: HotConfig,
    behaviour: Behaviour,
    *,
    started_at: float,
    ready: bool,
    product: str,
    profiled: bool,
    streamed_tokens: int,
) -> RuntimeState:
    """The state at this moment, `streamed_tokens` of real requests included."""
    now = time.time()
    load_s = now - started_at if behaviour.tokens_per_s else 0.0
    tokens = int(load_s * behaviour.tokens_per_s) + streamed_tokens
    reason = _reason(boot, hot, behaviour)
    speculating = reason == "Pays"
    return RuntimeState(
        service=boot.service,
        namespace=boot.namespace,
        revision=boot.revision,
        config_hash=config_hash(hot),
        started_at=started_at,
        now=now,
        ready=ready,
        plugin_active=True,
        product=product,
        profile=ProfileState(source=ProfileSource.MOUNTED if profiled else ProfileSource.LEARNING),
        choice=ChoiceState(reason=reason, running=4 if load_s else 0),
        steps=int(load_s * STEPS_PER_S),
        speculative_steps=int(load_s * STEPS_PER_S) if speculating else 0,
        output_tokens=tokens,
        busy_s=load_s,
        draft_length_steps=[0, 0, int(load_s * STEPS_PER_S)] if speculating else [int(load_s * STEPS_PER_S)],
        drafters=[
            _drafter(drafter.name, behaviour, load_s if speculating and not index else 0.0)
            for index, drafter in enumerate(boot.draft_pool)
        ],
        slo_classes=[_slo_class(slo.name, behaviour, load_s) for slo in hot.slo_classes],
        speedup=_speedup(behaviour, load_s),
    )


def _reason(boot: BootConfig, hot: HotConfig, behaviour: Behaviour) -> str:
    if hot.mode is SpeculationMode.OFF:
        return "Off"
    if not any(drafter.name != behaviour.unloadable for drafter in boot.draft_pool):
        return "NoDrafter"
    if not behaviour.tokens_per_s:
        return "NoTraffic"
    return "Pays" if behaviour.speedup > 1 or behaviour.reckless else "NotWorthIt"


def _drafter(name: str, behaviour: Behaviour, load_s: float) -> DrafterState:
    steps = int(load_s * STEPS_PER_S)
    loaded = name != behaviour.unloadable
    return DrafterState(
        name=name,
        loaded=loaded,
        reason="" if loaded else "its weights do not fit the target",
        request_steps=steps,
        tried=2 * steps,
        verified=2 * steps,
        accepted=int(1.4 * steps),
    )


def _slo_class(name: str, behaviour: Behaviour, load_s: float) -> SLOClassState:
    finished = int(load_s * 400)
    tpot = [0] * (len(TPOT_BUCKETS_S) + 1)
    tpot[TPOT_BUCKETS_S.index(0.02)] = finished
    ttft = [0] * (len(TTFT_BUCKETS_S) + 1)
    ttft[TTFT_BUCKETS_S.index(0.1)] = finished
    return SLOClassState(
        name=name,
        finished=finished,
        attained=int(finished * behaviour.attained_percent / 100),
        output_tokens=finished * 16,
        tpot=Histogram(counts=tpot, sum_s=finished * 0.018),
        ttft=Histogram(counts=ttft, sum_s=finished * 0.08),
    )


def _speedup(behaviour: Behaviour, load_s: float) -> SpeedupState:
    probe_s = load_s * 0.05
    return SpeedupState(
        probes=int(load_s),
        baseline_tokens=int(probe_s * 100_000),
        baseline_s=probe_s,
        speculative_tokens=int(probe_s * 100_000 * behaviour.speedup),
        speculative_s=probe_s,
        weight=WEIGHT_PER_S * load_s,
        weighted_ratio=WEIGHT_PER_S * load_s * behaviour.speedup,
    )
