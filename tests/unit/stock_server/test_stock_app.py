"""What reaches vLLM's app, and what Outrider answers itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest
from outrider_crds.runtime_state import RuntimeState
from outrider_runtime.drafters.suffix import TENANT_ARGUMENT
from outrider_runtime.server.page_server import WebPage
from outrider_runtime.stock_server.activity import Activity
from outrider_runtime.stock_server.entry_point import STRICT_VARIABLE
from outrider_runtime.stock_server.stock_app import SeparateCollector, ServedPages, StockApp
from prometheus_client import REGISTRY, CollectorRegistry, Gauge, generate_latest

from tests.unit.server.test_gate import CHAT, Engine

BODY = b'{"model":  "m", "vllm_xargs": {"mine": 1}}'


class Pages:
    def __init__(self, *classes: str, names_tenants: bool = False) -> None:
        self._classes = classes
        self.names_tenants = names_tenants

    def answer(self, path: str) -> WebPage:
        return WebPage(HTTPStatus.OK, "text/plain", path.encode())

    def slo_classes(self) -> Sequence[str]:
        return self._classes


async def send(
    engine: Engine, pages: ServedPages | None, path: str = CHAT, **headers: str
) -> httpx.Response:  # fmt: skip
    app = StockApp(engine, Activity(), pages)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://pod") as client:
        if path != CHAT:
            return await client.get(path)
        return await client.post(path, content=BODY, headers=headers)


async def test_request_without_slo_header_is_untouched() -> None:
    engine = Engine()
    assert (await send(engine, Pages("batch"))).text == "one two"
    assert engine.bodies == [BODY]


async def test_slo_header_becomes_the_class_of_the_body() -> None:
    engine = Engine()
    assert (await send(engine, Pages("batch"), **{"X-SLO-Class": "batch"})).status_code == 200
    assert json.loads(engine.bodies[0])["vllm_xargs"] == {"mine": 1, "slo_class": "batch"}
    assert engine.headers[0][b"content-length"] == str(len(engine.bodies[0])).encode()


async def test_tenant_is_named_if_drafters_share_by_tenant() -> None:
    engine = Engine()
    for pages in (Pages("batch", names_tenants=True), Pages(names_tenants=True)):
        await send(engine, pages, **{"Authorization": "Bearer one", "X-SLO-Class": "batch"})
    arguments = [json.loads(body)["vllm_xargs"] for body in engine.bodies]
    assert [sorted(names) for names in arguments] == [["mine", TENANT_ARGUMENT, "slo_class"], ["mine", TENANT_ARGUMENT]]


async def test_unknown_slo_class_is_refused_with_the_known() -> None:
    engine = Engine()
    answer = await send(engine, Pages("batch"), **{"X-SLO-Class": "gold"})
    assert answer.status_code == 400
    assert "known classes: batch" in answer.json()["error"]["message"]
    assert not engine.bodies


@pytest.mark.parametrize("pages", [None, Pages()], ids=["not active", "no classes"])
async def test_slo_header_without_classes_is_ignored(pages: ServedPages | None) -> None:
    engine = Engine()
    assert (await send(engine, pages, **{"X-SLO-Class": "gold"})).status_code == 200
    assert engine.bodies == [BODY]


async def test_pages_say_why_outrider_is_not_active() -> None:
    assert (await send(Engine(), Pages(), "/outrider/why")).text == "/outrider/why"
    answer = await send(Engine(), None, "/outrider/state")
    assert answer.status_code == 503
    assert "not active: the engine is starting" in answer.json()["error"]


def test_reason_is_in_the_metric_and_in_a_strict_error() -> None:
    activity = Activity()
    activity.step_aside("no\nway", {})
    assert REGISTRY.get_sample_value("outrider_active", {"reason": "no way"}) == 0
    with pytest.raises(SystemExit, match=f"{STRICT_VARIABLE} is set: no way"):
        activity.step_aside("no way", {STRICT_VARIABLE: "1"})
    activity.active(["lookup"], 5)
    assert REGISTRY.get_sample_value("outrider_active", {"reason": ""}) == 1
    assert REGISTRY.get_sample_value("outrider_active", {"reason": "no way"}) is None


def test_metric_of_several_processes_is_one_or_zero(tmp_path: Path) -> None:
    """Bug: with PROMETHEUS_MULTIPROC_DIR, an engine that stepped aside later still had a sample of 1."""
    program = """
from outrider_runtime.stock_server.activity import Activity
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
activity, registry = Activity(), CollectorRegistry()
MultiProcessCollector(registry)
activity.active(["lookup"], 5)
print(registry.get_sample_value("outrider_active", {"reason": ""}))
activity.step_aside("no way")
print(registry.get_sample_value("outrider_active", {"reason": ""}))
"""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1.0", "0.0"]


def test_reason_has_no_credentials_of_a_uri() -> None:
    activity = Activity()
    activity.step_aside("model 's3://KEY:SE/CRET@bucket/llama?sig=SECRET' is not there: use s3://x/y", {})
    assert activity.reason == "model 's3://bucket/llama' is not there: use s3://x/y"


def test_metrics_of_vllm_survive_an_error_in_outriders() -> None:
    def read_state() -> RuntimeState:
        raise OSError("no snapshot")

    registry = CollectorRegistry()
    registry.register(SeparateCollector(read_state))
    Gauge("vllm_requests", "Requests.", registry=registry).set(3)
    text = generate_latest(registry).decode()
    assert "vllm_requests 3.0" in text
    assert "outrider" not in text
