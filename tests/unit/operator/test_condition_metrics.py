"""The conditions as Prometheus sees them."""

from __future__ import annotations

from typing import Any

from outrider_operator.cluster.cache import ObjectCache
from outrider_operator.kinds import SERVICE
from outrider_operator.operator_metrics.status_metrics import ServiceStatusMetrics
from prometheus_client import CollectorRegistry, generate_latest


def service(name: str, version: int, *conditions: dict[str, Any], **status: Any) -> dict[str, Any]:
    metadata = {"namespace": "a", "name": name, "uid": name, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {}, "status": {"conditions": list(conditions), **status}}


def condition(type_: str, status: str, reason: str) -> dict[str, Any]:
    return {"type": type_, "status": status, "reason": reason, "lastTransitionTime": "2026-01-01T00:00:00Z"}


def scrape(cache: ObjectCache) -> list[str]:
    registry = CollectorRegistry()
    registry.register(ServiceStatusMetrics(lambda: cache.all(SERVICE)))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_condition_is_one_series_that_ends_with_the_service() -> None:
    """An alert must neither fire for a service that was deleted nor see two reasons at once."""
    cache = ObjectCache()
    cache.seen(SERVICE, service("chat", 1, condition("Ready", "False", "NoReadyEndpoint")))
    labels = 'outrider_namespace="a",outrider_service="chat",reason="{}",status="{}",type="Ready"'
    assert scrape(cache) == [f"outrider_service_condition{{{labels.format('NoReadyEndpoint', 'False')}}} 1.0"]
    ready = service("chat", 2, condition("Ready", "True", "EndpointReady"))
    cache.seen(SERVICE, ready)
    assert scrape(cache) == [f"outrider_service_condition{{{labels.format('EndpointReady', 'True')}}} 1.0"]
    cache.gone(SERVICE, ready)
    assert scrape(cache) == []


def test_a_status_that_cannot_be_read_costs_its_own_series_only() -> None:
    """A scrape that fails as a whole would blind every alert."""
    cache = ObjectCache()
    cache.seen(SERVICE, service("odd", 1, {"type": "Ready"}, replicas="many"))
    cache.seen(SERVICE, service("chat", 1, condition("Ready", "True", "EndpointReady")))
    assert len(scrape(cache)) == 1


def test_condition_of_a_later_release_loses_its_own_series_only() -> None:
    """The whole status was unreadable after a rollback: every alert was blind, every verdict set again."""
    cache = ObjectCache()
    conditions = [condition("OfTomorrow", "True", "New"), condition("Ready", "True", "EndpointReady")]
    cache.seen(SERVICE, service("chat", 1, *conditions))
    assert len(scrape(cache)) == 1


def test_a_draft_canary_has_its_phase_requests_and_gain() -> None:
    """A dashboard shows what the status says; before the first judgement there is no gain, not one of 0."""
    cache = ObjectCache()
    rollout = {"phase": "Failed", "cause": "Worse", "requests": 812, "gainPercent": "-4.1"}
    cache.seen(SERVICE, service("chat", 1, rollout=rollout))
    owner = 'outrider_namespace="a",outrider_service="chat"'
    assert scrape(cache) == [
        f'outrider_service_rollout{{cause="Worse",{owner},phase="Failed"}} 1.0',
        f"outrider_service_rollout_requests{{{owner}}} 812.0",
        f"outrider_service_rollout_gain{{{owner}}} -0.040999999999999995",
    ]
    cache.seen(SERVICE, service("chat", 2, rollout={"phase": "Starting"}))
    assert [line for line in scrape(cache) if "gain" in line] == []
    cache.seen(SERVICE, service("chat", 3, rollout={"ignored": ["promote=x"]}))
    assert scrape(cache) == []
