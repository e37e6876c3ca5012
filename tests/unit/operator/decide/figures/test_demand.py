"""Replicas at the SLO: what an autoscaler gets to read, and when it gets nothing."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from outrider_crds.profile import ProfileExecutionMode, ProfileStepCost, TargetProfile
from outrider_operator.cluster_model import FigureWindows, SLOClassFigures, WindowFigures
from outrider_operator.decide.figures.demand import Load, capacity, load_of
from outrider_operator.operator_metrics.demand_metrics import LABELS, NAME, ServiceDemand
from prometheus_client import CollectorRegistry, generate_latest

from tests.unit.operator.decide.world import World, manifest, rfc3339, target_profile

EXAMPLES = Path(__file__).parents[5] / "examples" / "autoscaling"
COST = ProfileStepCost(constant_s=0.01, per_batched_token_s=0.0001)
PROFILE = TargetProfile(
    key="ab",
    model="org/target",
    product="H100",
    costs={ProfileExecutionMode.UNIFORM: COST},
    error_percent=1.0,
    most_requests=128,
    measured_at="2026-11-01T00:00:00Z",
)


def _figures(rate: float, batch: float, step_s: float, tokens_per_step: float = 1.0, pods: int = 1) -> WindowFigures:
    """A window of 60 s."""
    steps = 60 * rate / (batch * tokens_per_step)
    return WindowFigures(
        window_s=60.0,
        pods_answered=pods,
        pods_ready=pods,
        output_tokens=60 * rate,
        request_steps=batch * steps,
        busy_steps=steps,
        busy_s=step_s * steps,
        tokens_per_step=tokens_per_step,
        slo_classes={"chat": SLOClassFigures(finished=10)},
    )


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
    """Steps take twice what the profile says of an empty context: none at 20 ms, 33 at 26.6 ms."""
    load = Load(tokens_per_s=1_000, tokens_per_step=1.0, batch=50, step_s=0.03)
    assert capacity(PROFILE, load, tpot_s=0.02) is None, "no replica keeps it"
    pod = capacity(PROFILE, load, tpot_s=0.0267)
    assert pod is not None
    assert pod.requests == 33


def test_overload_counts_the_requests_that_pile_up() -> None:
    """Two pods at 128 requests and 22.8 ms, where the SLO allows 100: 2.56 pods hold what is under way."""
    step_s = COST.without_context_s(128, 1)
    load = Load(tokens_per_s=2 * 128 / step_s, tokens_per_step=1.0, batch=128, step_s=step_s)
    pod = capacity(PROFILE, load, tpot_s=0.02)
    assert pod is not None
    assert pod.replicas == pytest.approx(2.56)


def _step_s(batch: float) -> float:
    """A step that reads contexts of 2,000 tokens, of which the profile of an empty context says nothing."""
    return COST.without_context_s(batch, 1) + 2_000 * 2e-8 * batch


def _pod(rate: float) -> Load:
    """A pod that gets `rate` tokens/s of requests: its batch is where it gives as much, at most 128."""
    low, high = 1.0, 128.0
    for _ in range(60):
        batch = (low + high) / 2
        low, high = (batch, high) if batch / _step_s(batch) < rate else (low, batch)
    return Load(min(rate, batch / _step_s(batch)), 1.0, batch, _step_s(batch))


@pytest.mark.parametrize("start", [1, 2, 5, 12])
def test_autoscaler_that_follows_demand_settles_where_the_slo_holds(start: int) -> None:
    """The example's rule: 80% of a pod, at most two pods up or one down at a time. Far from the SLO the demand is too
    low, as contexts matter less in small batches; it is right where it is acted on."""
    rate, tpot_s, pods = 24_000.0, 0.025, start
    for _ in range(30):
        pod = _pod(rate / pods)
        load = replace(pod, tokens_per_s=pods * pod.tokens_per_s)
        advice = capacity(PROFILE, load, tpot_s)
        assert advice is not None
        pods = max(pods - 1, min(pods + 2, math.ceil(advice.replicas / 0.8)))
    least = next(count for count in range(1, 20) if _pod(rate / count).step_s <= tpot_s)
    assert _pod(rate / pods).step_s <= tpot_s
    assert least <= pods <= math.ceil(least / 0.8)


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
    world = World(manifest())
    world.serve()
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
    unmeasured = World(manifest(profiling={"mode": "Skip"}))
    unmeasured.serve()
    unmeasured.figures = FigureWindows(current=_figures(1_000, 10, 0.011))
    assert _demand(unmeasured) == []


def test_demand_of_a_service_without_traffic_is_zero() -> None:
    """Pods that answer and have nothing to do were measured."""
    world = _served()
    idle = WindowFigures(window_s=60.0, pods_answered=1, pods_ready=1)
    world.figures = FigureWindows(current=idle)
    assert [entry["replicas"] for entry in _demand(world)] == ["0"]


def test_demand_is_one_series_for_each_product() -> None:
    """Prometheus scrapes these; what someone else wrote into a status is no number."""

    def service(name: str, *replicas: str) -> dict[str, object]:
        entries = [{"product": f"p{index}", "replicas": text, "requests": 1, "tokensPerSecond": "1"}
                   for index, text in enumerate(replicas)]  # fmt: skip
        return {"metadata": {"namespace": "a", "name": name}, "spec": {}, "status": {"demand": entries}}

    registry = CollectorRegistry()
    registry.register(ServiceDemand(lambda: [service("chat", "2.31", "nan", "many"), service("idle")]))
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert lines == [
        'outrider_demand_replicas{outrider_namespace="a",outrider_service="chat",product="p0"} 2.31',
    ]


def test_autoscaling_examples_read_the_series_that_the_operator_exports() -> None:
    """A renamed label would leave an autoscaler without an answer for ever."""
    scaled, hpa, rule = (
        yaml.safe_load((EXAMPLES / name).read_text())
        for name in ("keda-scaledobject.yaml", "hpa-external.yaml", "prometheus-adapter-rule.yaml")
    )
    external = hpa["spec"]["metrics"][0]["external"]["metric"]
    (adapted,) = rule["rules"]["external"]
    queries = (scaled["spec"]["triggers"][0]["metadata"]["query"], adapted["seriesQuery"])
    assert {external["name"], adapted["name"]["as"]} == {NAME}
    assert all(re.search(rf"\b{NAME}\{{", query) for query in queries)
    labels = {*re.findall(r"(\w+)!?=", " ".join(queries)), *external["selector"]["matchLabels"]}
    assert labels <= set(LABELS)
    target = {"apiVersion": "outrider.dev/v1alpha1", "kind": "SpeculativeService", "name": "llama-chat"}
    assert scaled["spec"]["scaleTargetRef"] == hpa["spec"]["scaleTargetRef"] == target
