"""The admin port as kubelet, operator and Prometheus see it."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator

import pytest
from outrider_crds.runtime_state import RuntimeState
from outrider_runtime.server.admin import PAGE_LIFETIME_S, AdminPages, serve_admin
from outrider_runtime.server.health import Phase, Vitals
from outrider_runtime.server.listeners import listen
from prometheus_client import CollectorRegistry, Counter

from tests.unit.server.runtime_states import runtime_state


class Pod:
    """An admin server over values that a test sets."""

    def __init__(self, listener: socket.socket) -> None:
        self.vitals = Vitals(phase=Phase.SERVING, plugin_active=True, report_age_s=0.1)
        self.steps = 3
        self.decisions = ""
        engine = CollectorRegistry()
        Counter("vllm_requests", "As the engine's own metrics", registry=engine).inc()
        self.port = listener.getsockname()[1]
        self.server = serve_admin(
            listener, AdminPages(lambda: self.vitals, self.state, engine, decisions=lambda: self.decisions)
        )

    def state(self) -> RuntimeState:
        if self.steps < 0:
            raise ValueError("no state")
        return runtime_state(steps=self.steps)

    def get(self, path: str) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers["Content-Type"], text


@pytest.fixture
def pod() -> Iterator[Pod]:
    with listen("127.0.0.1", 0, "--admin-port") as listener:
        made = Pod(listener)
        yield made
        made.server.stop()


def test_failed_probe_answers_with_the_reason(pod: Pod) -> None:
    """`kubectl describe pod` shows the body of a failed probe."""
    assert pod.get("/readyz")[::2] == (200, "ok\n")
    assert pod.get("/livez")[::2] == (200, "ok\n")
    pod.vitals = Vitals(phase=Phase.SERVING)
    status, _, text = pod.get("/readyz")
    assert status == 503
    assert "plugin inside the engine has not reported" in text
    pod.vitals = Vitals(phase=Phase.SERVING, engine_dead=True)
    assert pod.get("/livez")[0] == 503


def test_decisions_are_served_as_text(pod: Pod) -> None:
    assert pod.get("/outrider/why")[::2] == (200, "no decision yet\n")
    time.sleep(PAGE_LIFETIME_S)
    pod.decisions = "12:00:00.00 2 requests: k = 0\n"
    assert pod.get("/outrider/why")[2] == pod.decisions


def test_state_page_parses_as_runtime_state(pod: Pod) -> None:
    """The operator parses it with the same model."""
    status, kind, text = pod.get("/outrider/state")
    assert (status, kind) == (200, "application/json")
    assert RuntimeState.model_validate_json(text) == pod.state()
    assert json.loads(text)["schemaVersion"] == 1


def test_metrics_page_has_the_engines_and_outriders(pod: Pod) -> None:
    """One scrape gets both."""
    status, kind, text = pod.get("/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    assert "vllm_requests_total 1.0" in text
    assert 'outrider_steps_total{outrider_namespace="demo",outrider_service="chat"} 3.0' in text


def test_unknown_page_is_a_404_that_lists_the_pages(pod: Pod) -> None:
    """Helps a user with curl to find the right page."""
    status, _, text = pod.get("/stats")
    assert status == 404
    assert "/outrider/state" in text


def test_probe_is_answered_after_another_page_failed(pod: Pod) -> None:
    """A bug in the state must not get a serving pod restarted."""
    pod.steps = -1
    assert pod.get("/outrider/state")[0] == 500
    assert pod.get("/livez")[0] == 200


def test_page_is_made_once_for_many_scrapes() -> None:
    """A page is made again only when there can be news, so that a flood of scrapes leaves the engine its processor."""
    time_s, made = [0.0], [0]

    def state() -> RuntimeState:
        made[0] += 1
        return runtime_state(steps=made[0])

    pages = AdminPages(lambda: Vitals(phase=Phase.SERVING), state, CollectorRegistry(), clock=lambda: time_s[0])
    made[0] = 0
    first = {pages.answer("/outrider/state").body for _ in range(50)}
    assert (made[0], len(first)) == (1, 1)
    time_s[0] += PAGE_LIFETIME_S
    assert pages.answer("/outrider/state").body not in first
