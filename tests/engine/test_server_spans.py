"""One request's id and trace, through a real server to a real OTLP receiver."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engine.server_process import EXAMPLE, TARGET, Server
from tests.otlp_receiver import receiving

pytestmark = pytest.mark.model

TRACE, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_request_is_followed_through_gate_and_engine(tmp_path: Path) -> None:
    """OTEL_EXPORTER_OTLP_ENDPOINT alone: the client's trace has the gate's span, and below it vLLM's. The client's id
    stands in the answer, in both spans and in `/outrider/why`."""
    manifest = tmp_path / "service.yaml"
    manifest.write_text(EXAMPLE.read_text())
    shutil.copytree(EXAMPLE.parent / "models", tmp_path / "models")
    with receiving() as receiver:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        server = Server(tmp_path / "log", TARGET.name, "-f", str(manifest), environment=environment)
        try:
            server.wait_until("readiness", server.is_ready)
            headers = {"X-Request-Id": "order-17", "traceparent": f"00-{TRACE}-{CLIENTS_SPAN}-01"}
            body = {"model": server.model, "prompt": "Once", "max_tokens": 40, "ignore_eos": True}
            answer = server.api.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            assert answer.headers["x-request-id"] == "order-17"
            assert "order-17" in answer.json()["id"]
            server.wait_until("the decision", lambda: "order-17" in server.admin.get("/outrider/why").text)
            server.wait_until("the engine's span", lambda: bool(receiver.named("llm_request")))
            server.wait_until("the gate's span", lambda: bool(receiver.named("outrider.request")))
        finally:
            server.stop()
    (gate,), (engine,) = receiver.named("outrider.request"), receiver.named("llm_request")
    assert (gate.trace_id, gate.parent_id) == (TRACE, CLIENTS_SPAN)
    assert (engine.trace_id, engine.parent_id) == (TRACE, gate.span_id)
    assert "order-17" in engine.attributes["gen_ai.request.id"]
    assert gate.service == engine.service == "smollm2"
