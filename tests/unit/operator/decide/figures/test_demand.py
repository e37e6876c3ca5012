"""Replicas at the SLO: what an autoscaler gets to read, and when it gets nothing."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from outrider_crds.profile import ProfileExecutionMode, ProfileStepCost, TargetProfile
from outrider_operator.decide.figures.demand import Capacity, Load, Slopes, capacity, load_of
from outrider_operator.figure_windows import FigureWindows, WindowCounts
from outrider_operator.operator_metrics.status_metrics import DEMAND, DEMAND_LABELS, ServiceStatusMetrics
from prometheus_client import CollectorRegistry, generate_latest

from tests.unit.operator.decide.window_counts import drafter, slo_class, window_counts
from tests.unit.operator.decide.world import World, manifest, rfc3339, target_profile

EXAMPLES = Path(__file__).parents[5] / "examples" / "autoscaling"
COST = ProfileStepCost(constant_s=0.01, per_batched_token_s=0.0001)
CHEAP = ProfileStepCost(constant_s=0.01, per_batched_token_s=0.00002)
PROFILE = TargetProfile(
    key="ab",
    model="org/target",
    product="H100",
    costs={ProfileExecutionMode.UNIFORM: COST},
    error_percent=1.0,
    most_requests=128,
    measured_at="2026-11-01T00:00:00Z",
)


def _figures(rate: float, batch: float, step_s: float, tokens_per_step: float = 1.0, pods: int = 1) -> WindowCounts:
    """A window of 60 s."""
    steps = 60 * rate / (batch * tokens_per_step)
    accepted = {"pld": drafter(accepted=(tokens_per_step - 1) * batch * steps)}
    return window_counts(
        pods=pods, output_tokens=60 * rate, request_steps=batch * steps, steps=steps, busy_s=step_s * steps,
        drafters=accepted, slo_classes={"chat": slo_class(10)},
    )  # fmt: skip


def test_capacity_is_the_largest_batch_within_the_tpot() -> None:
    """T(B) = 10 ms + 0.1 ms * B <= 20 ms: B = 100, 5,000 tokens/s a pod, of which 12,500 take 2.5."""
    pod = capacity(PROFILE, Load(tokens_per_s=12_500, tokens_per_step=1.0, batch=50, step_s=0.015), tpot_s=0.02)
    assert pod is not None
    assert pod.requests == 100
    assert pod.tokens_per_s == pytest.approx(5_000)
    assert pod.replicas == pytest.approx(2.5)


def test_accepted_drafts_lower_the_demand() -> None:
    """T(B) may be 40 ms with two tokens a step: the whole batch of 128 fits, and each step brings 256 tokens."""
    step_s = COST.without_context_s(50, 2)
    pod = capacity(PROFILE, Load(tokens_per_s=12_500, tokens_per_step=2.0, batch=50, step_s=step_s), tpot_s=0.02)
    assert pod is not None
    assert pod.requests == 128
    assert pod.replicas == pytest.approx(12_500 / (256 / COST.without_context_s(128, 2)))


def test_contexts_and_prompts_that_slow_steps_raise_the_demand() -> None:
    """Steps of 50 requests take 30 ms, of which the profile of an empty context knows 15: T(B) = 10 ms + 0.4 ms * B, so
    25 requests keep 20 ms."""
    load = Load(tokens_per_s=1_000, tokens_per_step=1.0, batch=50, step_s=0.03)
    assert capacity(PROFILE, load, tpot_s=0.010) is None, "no replica keeps it"
    pod = capacity(PROFILE, load, tpot_s=0.0201)
    assert pod is not None
    assert pod.requests == 25


def test_load_past_the_slo_has_a_demand() -> None:
    """Steps of 122 requests took 22 ms, and by the profile 8. Multiplied by that ratio no batch kept 8 ms a token: an
    autoscaler saw no series at 60 requests/s, of which a pod takes 33 (bench.demand)."""
    cost = ProfileStepCost(
        per_batched_token_s=8.0e-6, per_batched_token_above_knee_s=7.9e-6, knee_tokens=128, constant_s=5.2e-3
    )
    profile = PROFILE.model_copy(update={"costs": {ProfileExecutionMode.UNIFORM: cost}})
    pod = capacity(profile, Load(tokens_per_s=9_892, tokens_per_step=1.82, batch=122, step_s=0.0223), tpot_s=0.008)
    assert pod is not None
    assert pod.replicas == pytest.approx(60 / 33, rel=0.1)


def test_steps_faster_than_profiled_lower_the_demand() -> None:
    """Half of 10 ms + 0.1 ms * B: all 128 keep 15 ms."""
    pod = capacity(PROFILE, Load(tokens_per_s=1_000, tokens_per_step=1.0, batch=50, step_s=0.0075), tpot_s=0.015)
    assert pod is not None
    assert pod.requests == 128


def test_overload_counts_the_requests_that_pile_up() -> None:
    """Two pods at 128 requests and 22.8 ms, where the SLO allows 100: 2.56 pods hold what is under way."""
    step_s = COST.without_context_s(128, 1)
    load = Load(tokens_per_s=2 * 128 / step_s, tokens_per_step=1.0, batch=128, step_s=step_s)
    pod = capacity(PROFILE, load, tpot_s=0.02)
    assert pod is not None
    assert pod.replicas == pytest.approx(2.56)


@dataclass(frozen=True)
class SimulatedPod:
    """Steps that read contexts of 2,000 tokens, of which the profile of an empty context says nothing."""

    cost: ProfileStepCost
    excess_s: float = 0.0
    """What each step takes above its profile, whatever its batch."""
    reports_slopes: bool = False

    def step_s(self, batch: float) -> float:
        return self.cost.without_context_s(batch, 1) + 2_000 * 8e-8 * batch + self.excess_s

    def load(self, rate: float) -> Load:
        """Load by `rate` tokens/s of requests: the batch is where the pod gives as much, at most 128."""
        low, high = 1.0, 128.0
        for _ in range(60):
            batch = (low + high) / 2
            low, high = (batch, high) if batch / self.step_s(batch) < rate else (low, batch)
        slopes = Slopes(step_s=self.step_s(batch + 1) - self.step_s(batch), tokens=1.0)
        step_s = self.step_s(batch)
        return Load(min(rate, batch / step_s), 1.0, batch, step_s, slopes if self.reports_slopes else None)


def _followed(simulated: SimulatedPod, rate: float, tpot_s: float, start: int) -> Iterator[int]:
    """Pods in 40 windows, by the example's rule: 80% of a pod, at most two pods up or one down at a time."""
    profile = PROFILE.model_copy(update={"costs": {ProfileExecutionMode.UNIFORM: simulated.cost}})
    pods = start
    for _ in range(40):
        pod = simulated.load(rate / pods)
        advice = capacity(profile, replace(pod, tokens_per_s=pods * pod.tokens_per_s), tpot_s)
        assert advice is not None
        pods = max(pods - 1, min(pods + 2, math.ceil(advice.replicas / 0.8)))
        yield pods


@pytest.mark.parametrize("start", [1, 2, 5, 12])
@pytest.mark.parametrize(
    "simulated",
    [
        SimulatedPod(COST),
        SimulatedPod(CHEAP),
        SimulatedPod(COST, reports_slopes=True),
        SimulatedPod(CHEAP, reports_slopes=True),
        SimulatedPod(COST, excess_s=0.01, reports_slopes=True),
        SimulatedPod(CHEAP, excess_s=0.01, reports_slopes=True),
    ],
)
def test_autoscaler_that_follows_demand_settles_within_the_slo(simulated: SimulatedPod, start: int) -> None:
    """Bug: the number of pods oscillated for ever and missed the SLO once in each round. The contexts of CHEAP cost
    more than its profile says, and the excess over the profile was scaled as the profile is. If every step had a
    constant excess, all of it counted as the requests', and demand grew with the number of pods without end."""
    rate, tpot_s = 24_000.0, 0.025
    settled = [*_followed(simulated, rate, tpot_s, start)][-10:]
    least = next(count for count in range(1, 40) if simulated.load(rate / count).step_s <= tpot_s)
    assert all(simulated.load(rate / pods).step_s <= tpot_s for pods in settled)
    assert least <= min(settled) <= max(settled) <= math.ceil(least / 0.8)


def requests_that_keep(load: Load, tpot_s: float) -> int:
    """Most requests of a pod whose time per token meets `tpot_s`."""
    pod = capacity(PROFILE, load, tpot_s)
    assert pod is not None
    return pod.requests


def test_excess_of_every_step_is_not_the_requests_own() -> None:
    """10 ms more in each step, and a slope as profiled: T(B) = 20 ms + 0.1 ms * B, so 50 requests keep 25 ms. Taken for
    the requests' own, as without slopes, it let 10 requests of a pod keep 25 ms, and the next pods still fewer."""
    load = Load(tokens_per_s=1_000, tokens_per_step=1.0, batch=10, step_s=0.021, slopes=Slopes(0.0001, 1.0))
    assert requests_that_keep(load, 0.02501) == 50
    assert requests_that_keep(replace(load, slopes=None), 0.02501) == 13


def test_larger_batches_that_draft_less_take_more_pods() -> None:
    """2 tokens at 20 requests and 1.5 of a further one: E(B) = 1.5 + 10 / B, so T(B) = 11 ms + 0.15 ms * B, and 60
    requests keep 12 ms a token. With 2 tokens at each batch 70 would."""
    load = Load(1_000, 2.0, 20, COST.without_context_s(20, 2), Slopes(step_s=0.00015, tokens=1.5))
    assert requests_that_keep(load, 0.01201) == 60
    assert requests_that_keep(replace(load, slopes=None), 0.01201) == 70


@dataclass(frozen=True)
class Prompts:
    """A pod that reads prompts of one length in chunks, and gives answers of one length."""

    prompt: int
    answer: int
    token_s: float = 3e-5
    context_token_s: float = 8e-8

    @property
    def cost(self) -> ProfileStepCost:
        return ProfileStepCost(constant_s=0.008, per_batched_token_s=self.token_s)

    def capacity_per_s(self, tpot_s: float) -> float:
        """Tokens per second at which the mean step takes `tpot_s`: each answer token brings its share of the prompt."""
        request_s = self.token_s * (1 + self.prompt / self.answer) + self.context_token_s * self.prompt
        return (tpot_s - self.cost.constant_s) / request_s / tpot_s

    def window(self, rate: float, seed: int = 0) -> WindowCounts:
        """300 s of Poisson arrivals that bring `rate` tokens/s: in a step 2,048 tokens and 256 requests at most."""
        draw, clock_s, arrival_s = random.Random(seed), 0.0, 0.0
        waiting: list[int] = []
        running: list[int] = []
        steps: list[tuple[int, float, float, int]] = []
        while clock_s < 300:
            while arrival_s <= clock_s:
                waiting.append(self.prompt)
                arrival_s += draw.expovariate(rate / self.answer)
            if not waiting and not running:
                clock_s = arrival_s
                continue
            batch, room, begun = len(running), 2048 - len(running), 0
            while waiting and room and batch + begun < 256:
                read = min(waiting[0], room)
                waiting[0] -= read
                room -= read
                if not waiting[0]:
                    waiting.pop(0)
                    begun += 1
            decode_s = self.cost.without_context_s(batch, 1) + self.context_token_s * self.prompt * batch
            prompts_s = self.token_s * (2048 - batch - room)
            clock_s += decode_s + prompts_s
            steps.append((batch, decode_s if batch else 0.0, prompts_s if batch else decode_s + prompts_s, begun))
            running = [left - 1 for left in running if left > 1] + [self.answer] * begun
        return window_counts(
            window_s=300.0, steps=len(steps),
            output_tokens=sum(batch + begun for batch, _, _, begun in steps),
            request_steps=sum(batch for batch, *_ in steps),
            busy_s=sum(decode_s + prompts_s for _, decode_s, prompts_s, _ in steps),
            batch_squared=sum(batch * batch for batch, *_ in steps),
            batch_busy_s=sum(batch * decode_s for batch, decode_s, *_ in steps),
            prompt_busy_s=sum(prompts_s for _, _, prompts_s, _ in steps),
        )  # fmt: skip

    def advice(self, figures: WindowCounts, tpot_s: float) -> Capacity | None:
        load = load_of(figures)
        assert load is not None
        return capacity(PROFILE.model_copy(update={"costs": {ProfileExecutionMode.UNIFORM: self.cost}}), load, tpot_s)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.8])
@pytest.mark.parametrize("pod", [Prompts(500, 200), Prompts(2000, 200), Prompts(6000, 100)])
def test_prompts_count_as_their_requests(pod: Prompts, share: float) -> None:
    """Bug: arrivals do not depend on the batch, so a slope over all seconds of the steps took those of prompts for a
    part of every step. At 6,000 prompt and 100 answer tokens the demand was 0.01 instead of 0.24."""
    advice = pod.advice(pod.window(share * pod.capacity_per_s(0.03)), tpot_s=0.03)
    assert advice is not None
    assert advice.replicas == pytest.approx(share, rel=0.15)


@pytest.mark.parametrize("start", [1, 4, 9])
def test_autoscaler_leaves_an_overload_by_long_prompts(start: int) -> None:
    """Bug: at a load of three pods, one pod prefills as many prompts per step as fit, and steps take ten times what
    the profile says. The profile seemed to be of another machine, so there was no demand, and the autoscaler stayed
    at one pod."""
    served, pods, settled = Prompts(6000, 100), start, []
    rate = 3 * served.capacity_per_s(0.03)
    for window in range(8):
        gained = served.window(rate / pods, seed=window).gained
        all_pods = gained.model_copy(update={"output_tokens": pods * gained.output_tokens})
        advice = served.advice(WindowCounts(300.0, 1, 1, all_pods, all_pods), tpot_s=0.03)
        assert advice is not None
        pods = math.ceil(advice.replicas / 0.8)
        settled.append(pods)
    assert {*settled[-4:]} == {4}


def test_demand_does_not_jump_as_batches_vary_more() -> None:
    """Poisson loads vary by 10% at 100 requests, right at the threshold that slopes had: demand went from 1 to 1.8 and
    back from window to window. Steps of 100 requests take 24 ms, of which 4 ms are every step's."""

    def replicas(spread: float) -> float:
        squared = 1_000 * 100**2 * (1 + spread)
        load = load_of(window_counts(
            output_tokens=100_000, request_steps=100_000, steps=1_000, busy_s=24.0, batch_squared=squared,
            batch_busy_s=0.024 * 100_000 + 0.0001 * (squared - 1_000 * 100**2),
        ))  # fmt: skip
        assert load is not None
        pod = capacity(PROFILE, load, tpot_s=0.0265)
        assert pod is not None
        return pod.replicas

    demands = [replicas(spread / 1000) for spread in range(60)]
    assert demands[0] > 1.05 * demands[-1]
    assert demands == sorted(demands, reverse=True)
    assert max(before / after for before, after in itertools.pairwise(demands)) < 1.02


@pytest.mark.parametrize(
    ("cost", "load"),
    [
        (ProfileStepCost(constant_s=0.0), Load(100, 1.0, 1.0, 0.01)),
        (COST, Load(100, 1.0, 1e15, 0.01)),
        (COST, Load(100, 1.0, 1e15, COST.without_context_s(1e15, 1))),
    ],
    ids=["empty-profile", "absurd-batch", "absurd-batch-as-profiled"],
)
def test_absurd_numbers_have_no_demand(cost: ProfileStepCost, load: Load) -> None:
    profile = PROFILE.model_copy(update={"costs": {ProfileExecutionMode.UNIFORM: cost}})
    assert capacity(profile, load, tpot_s=0.02) is None


def test_fraction_of_a_step_is_too_few_to_tell_its_time() -> None:
    """Prometheus extrapolates: a counter that did not grow by one may have grown by 1e-9."""
    figures = window_counts(output_tokens=60_000, request_steps=60_000, steps=1e-9, busy_s=60.0)
    assert load_of(figures) == Load(tokens_per_s=1_000, tokens_per_step=1.0, batch=1.0, step_s=0.0)


def test_slopes_of_a_window_are_those_of_its_steps() -> None:
    """Half of the steps have 10 requests, 12 ms and 5 accepted tokens, half 30 requests, 18 ms and 9: 0.3 ms and 1.2
    tokens a request. Steps of one batch tell no slope, and pods of older releases report none."""

    def of_window(batch_squared: float) -> Load | None:
        return load_of(window_counts(
            output_tokens=27_000, request_steps=20_000, steps=1_000, busy_s=15.0,
            drafters={"pld": drafter(accepted=7_000)}, batch_squared=batch_squared,
            batch_busy_s=500 * (0.12 + 0.54), batch_accepted=500 * (50 + 270),
        ))  # fmt: skip

    load = of_window(500 * (100 + 900))
    assert load is not None
    assert load.slopes is not None
    assert load.slopes.step_s == pytest.approx(0.0003)
    assert load.slopes.tokens == pytest.approx(1.2)
    for squared in (1_000 * 400, 0.0):
        load = of_window(squared)
        assert load is not None
        assert load.slopes is None


def test_profile_of_another_machine_says_nothing() -> None:
    assert capacity(PROFILE, Load(1_000, 1.0, 10, step_s=0.5), tpot_s=0.05) is None


def test_pods_that_do_not_answer_count_as_the_others() -> None:
    figures = replace(_figures(1_000, 10, 0.011, pods=2), pods_ready=4)
    load = load_of(figures)
    assert load is not None
    assert load.tokens_per_s == pytest.approx(2_000)
    assert load_of(replace(figures, pods_answered=0)) is None
    assert load_of(None) is None


def _served() -> World:
    world = World(manifest()).served()
    for job in world.jobs():
        world.measure(job, most_requests=128)
    world.settle()
    return world


def _demand(world: World) -> list[dict[str, object]]:
    world.reconcile()
    entries: list[dict[str, object]] = world.services["chat"]["status"].get("demand", [])
    return entries


def test_status_names_the_demand_of_each_measured_product() -> None:
    world = _served()
    step_s = next(iter(target_profile("ab", "cpu", rfc3339(world.now)).costs.values())).without_context_s(4, 1)
    world.figures = FigureWindows(current=_figures(4 / step_s, 4, step_s))
    (entry,) = _demand(world)
    assert entry["product"] == "cpu"
    assert 0 < float(str(entry["replicas"])) <= 1


def test_demand_without_figures_or_profile_is_absent() -> None:
    """An autoscaler must see nothing, not 0: it would take every pod away."""
    world = _served()
    world.figures = FigureWindows(error="Prometheus does not answer")
    assert _demand(world) == []
    unmeasured = World(manifest(profiling={"mode": "Skip"})).served()
    unmeasured.figures = FigureWindows(current=_figures(1_000, 10, 0.011))
    assert _demand(unmeasured) == []


def test_demand_of_a_service_without_traffic_is_zero() -> None:
    """Pods that answer and have nothing to do were measured."""
    world = _served()
    idle = window_counts()
    world.figures = FigureWindows(current=idle)
    assert [entry["replicas"] for entry in _demand(world)] == ["0"]


def test_demand_is_one_series_for_each_product() -> None:
    """Prometheus scrapes these; what someone else wrote into a status is no number."""

    def service(name: str, *replicas: str) -> dict[str, object]:
        entries = [{"product": f"p{index}", "replicas": text, "requests": 1, "tokensPerSecond": "1"}
                   for index, text in enumerate(replicas)]  # fmt: skip
        return {"metadata": {"namespace": "a", "name": name}, "spec": {}, "status": {"demand": entries}}

    registry = CollectorRegistry()
    registry.register(ServiceStatusMetrics(lambda: [service("chat", "2.31", "nan", "many"), service("idle")]))
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert lines == [
        'outrider_demand_replicas{outrider_namespace="a",outrider_service="chat",product="p0"} 2.31',
    ]


def test_autoscaling_examples_read_the_operators_series() -> None:
    """A renamed label would leave an autoscaler without an answer for ever."""
    scaled, hpa, rule = (
        yaml.safe_load((EXAMPLES / name).read_text())
        for name in ("keda-scaledobject.yaml", "hpa-external.yaml", "prometheus-adapter-rule.yaml")
    )
    external = hpa["spec"]["metrics"][0]["external"]["metric"]
    (adapted,) = rule["rules"]["external"]
    queries = (scaled["spec"]["triggers"][0]["metadata"]["query"], adapted["seriesQuery"])
    assert {external["name"], adapted["name"]["as"]} == {DEMAND}
    assert all(re.search(rf"\b{DEMAND}\{{", query) for query in queries)
    labels = {*re.findall(r"(\w+)!?=", " ".join(queries)), *external["selector"]["matchLabels"]}
    assert labels <= set(DEMAND_LABELS)
    target = {"apiVersion": "outrider.dev/v1alpha1", "kind": "SpeculativeService", "name": "llama-chat"}
    assert scaled["spec"]["scaleTargetRef"] == hpa["spec"]["scaleTargetRef"] == target
