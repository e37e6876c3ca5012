"""The state that the stand-in reports: a steady, made-up load whose counters follow the clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from outrider_crds.counters import TPOT_BUCKETS_S, TTFT_BUCKETS_S, ArmCounters, HistogramState, SpeedupCounters
from outrider_crds.runtime_config import BootConfig, CanaryConfig, HotConfig, config_hash
from outrider_crds.runtime_state import (
    AdapterState,
    CanaryState,
    ChoiceState,
    DrafterReport,
    ProfileSource,
    ProfileState,
    RuntimeState,
    SLOClassState,
)
from outrider_crds.spec import SpeculationMode

WEIGHT_PER_S = 10_000.0
"""Weight of the probes: a second of load gives exactly 1%."""
STEPS_PER_S = 20.0
CANARY_TOKENS, CANARY_PRICE_S, CANARY_VARIATION, CANARY_CORRELATION = 100, 0.5, 0.2, 0.5
"""Mean tokens and price of a stable arm's request, the deviation / mean of both, and their correlation."""
WORSE = -0.3
"""Gain of a candidate that has the drafter `Behaviour.worse`."""
MISFIT = "rank 32 is above engine.lora.maxRank"
"""Reason of an adapter that does not fit."""
FATAL_S = 20.0
"""Seconds from a canary's start to its pod's end. The operator asks a pod that did not answer again after 15 s.
Sums alone show that the candidate has run."""


@dataclass(frozen=True)
class Behaviour:
    """How the stand-in behaves, from STANDIN_* variables."""

    tokens_per_s: float = 0.0
    """Goodput; 0 is a service without traffic."""
    speedup: float = 1.5
    """Speed-up; below 1 the choice is not to speculate."""
    attained_percent: float = 100.0
    """Share of requests that meet their class."""
    reckless: bool = False
    """Speculates even where that loses."""
    unloadable: str = ""
    """Name of a drafter that does not load."""
    unloadable_reason: str = "its weights do not fit the target"
    """The state's words for it."""
    misfit: str = ""
    """Name of an adapter that does not fit the target."""
    start_s: float = 0.2
    """Seconds from start to ready; negative: never."""
    crash: bool = False
    canary_gain_percent: float = 10.0
    """Candidate's goodput by the stable arm's, less 100%."""
    canary_requests_per_s: float = 100.0
    """Requests of a canary that finish, in both arms together, where there is traffic (`tokens_per_s`)."""
    canary_failures: int = 0
    """Times that a drafter of the candidate was suspended."""
    worse: str = ""
    """Name of a drafter: a candidate that has it gives 30% less goodput, unless the stable arm has it, too."""
    fatal: str = ""
    """Name of a drafter: a canary's pod that hosts it for the candidate alone runs out of memory `FATAL_S` into each
    process."""
    without_canary: bool = False
    """The state has no `canary`, as in a release that does not know it."""
    fill_bytes: int = 0
    """Written to the model cache at the start."""
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
            unloadable_reason=environment.get("STANDIN_UNLOADABLE_REASON", Behaviour.unloadable_reason),
            misfit=environment.get("STANDIN_MISFIT", ""),
            start_s=number("START_S", 0.2),
            crash="STANDIN_CRASH" in environment,
            canary_gain_percent=number("CANARY_GAIN_PERCENT", 10.0),
            canary_requests_per_s=number("CANARY_REQUESTS_PER_S", 100.0),
            canary_failures=int(number("CANARY_FAILURES", 0)),
            worse=environment.get("STANDIN_WORSE", ""),
            fatal=environment.get("STANDIN_FATAL", ""),
            without_canary="STANDIN_WITHOUT_CANARY" in environment,
            fill_bytes=int(environment.get("STANDIN_FILL_BYTES", 0)),
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
    canary_since: float = 0.0,
) -> RuntimeState:
    """The state at this moment, `streamed_tokens` of real requests included. canary_since: Unix seconds at which the
    canary's attempt began."""
    at = time.time()
    load_s = at - started_at if behaviour.tokens_per_s else 0.0
    tokens = int(load_s * behaviour.tokens_per_s) + streamed_tokens
    reason = _reason(boot, hot, behaviour)
    speculating = reason == "Pays"
    return RuntimeState(
        service=boot.service,
        namespace=boot.namespace,
        revision=boot.revision,
        config_hash=config_hash(hot),
        started_at=started_at,
        reported_at=at,
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
            _drafter(drafter.name, behaviour, load_s if speculating and (is_first or hot.canary is not None) else 0.0)
            for is_first, drafter in ((not index, drafter) for index, drafter in enumerate(boot.draft_pool))
        ],
        slo_classes=[_slo_class(slo.name, behaviour, load_s) for slo in hot.slo_classes],
        adapters=[_adapter(adapter.name, hot, behaviour, load_s) for adapter in hot.adapters or ()],
        speedup=_speedup(behaviour, load_s),
        canary=_canary(hot, behaviour, at - canary_since if load_s else 0.0),
    )


def _canary(hot: HotConfig, behaviour: Behaviour, seconds: float) -> CanaryState | None:
    """Sums after so many seconds of the attempt. With the default of 100 requests a second a gain of 10% leaves
    the line of -3% within seconds, WORSE at once; a gain of -3% never does."""
    canary = hot.canary
    if canary is None or behaviour.without_canary:
        return None
    gain = WORSE if is_new(canary, behaviour.worse) else behaviour.canary_gain_percent / 100
    share, requests = canary.candidate_percent / 100, seconds * behaviour.canary_requests_per_s
    candidate = _arm(hot, behaviour, int(share * requests), gain)
    return CanaryState(
        id=canary.id,
        stable=_arm(hot, behaviour, int((1 - share) * requests), 0.0),
        candidate=candidate.model_copy(update={"failures": behaviour.canary_failures}),
    )


def is_new(canary: CanaryConfig, drafter: str) -> bool:
    """Does the candidate alone have the drafter?"""
    return drafter in canary.candidate and drafter not in canary.stable


def _arm(hot: HotConfig, behaviour: Behaviour, requests: int, gain: float) -> ArmCounters:
    tokens, square = CANARY_TOKENS, 1 + CANARY_VARIATION**2
    plain_s, price_s = CANARY_PRICE_S, CANARY_PRICE_S / (1 + gain)
    product = 1 + CANARY_CORRELATION * CANARY_VARIATION**2
    classes = [slo.name for slo in hot.slo_classes]
    of_class = requests // max(1, len(classes))
    return ArmCounters(
        requests=requests, tokens=requests * tokens, plain_s=requests * plain_s,
        speculated_s=requests * plain_s, price_s=requests * price_s,
        plain_squared=requests * plain_s**2 * square, price_squared=requests * price_s**2 * square,
        plain_times_price=requests * plain_s * price_s * product,
        finished=dict.fromkeys(classes, of_class),
        attained=dict.fromkeys(classes, int(of_class * behaviour.attained_percent / 100)),
    )  # fmt: skip


def _reason(boot: BootConfig, hot: HotConfig, behaviour: Behaviour) -> str:
    if hot.mode is SpeculationMode.OFF:
        return "Off"
    if not any(drafter.name != behaviour.unloadable for drafter in boot.draft_pool):
        return "NoDrafter"
    if not behaviour.tokens_per_s:
        return "NoTraffic"
    return "Pays" if behaviour.speedup > 1 or behaviour.reckless else "NotWorthIt"


def _drafter(name: str, behaviour: Behaviour, load_s: float) -> DrafterReport:
    steps = int(load_s * STEPS_PER_S)
    loaded = name != behaviour.unloadable
    return DrafterReport(
        name=name,
        loaded=loaded,
        reason="" if loaded else behaviour.unloadable_reason,
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
        tpot=HistogramState(counts=tpot, sum_s=finished * 0.018),
        ttft=HistogramState(counts=ttft, sum_s=finished * 0.08),
    )


def _adapter(name: str, hot: HotConfig, behaviour: Behaviour, load_s: float) -> AdapterState:
    """An adapter with 10 requests a second of each class, and an acceptance rate of 0.5."""
    if name == behaviour.misfit:
        return AdapterState(name=name, reason=MISFIT)
    requests = int(load_s * 10)
    return AdapterState(
        name=name,
        loaded=True,
        output_tokens=requests * 16,
        tried=requests * 20,
        accepted=requests * 10,
        finished={slo.name: requests for slo in hot.slo_classes},
        attained={slo.name: int(requests * behaviour.attained_percent / 100) for slo in hot.slo_classes},
    )


def _speedup(behaviour: Behaviour, load_s: float) -> SpeedupCounters:
    probe_s = load_s * 0.05
    return SpeedupCounters(
        probes=int(load_s),
        baseline_tokens=int(probe_s * 100_000),
        baseline_s=probe_s,
        speculative_tokens=int(probe_s * 100_000 * behaviour.speedup),
        speculative_s=probe_s,
        weight=WEIGHT_PER_S * load_s,
        weighted_ratio=WEIGHT_PER_S * load_s * behaviour.speedup,
    )
