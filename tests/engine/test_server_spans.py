"""One request's id and trace, through a real server to a real OTLP receiver."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Laptop

pytestmark = pytest.mark.model

TRACE, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_request_is_followed_through_gate_and_engine(laptop: Laptop) -> None:
    """OTEL_EXPORTER_OTLP_ENDPOINT alone: the client's trace has the gate's span, and below it vLLM's. The client's id
    stands in the answer, in both spans and in `/outrider/why`."""
    server, receiver = laptop.server, laptop.receiver
    headers = {"X-Request-Id": "order-17", "traceparent": f"00-{TRACE}-{CLIENTS_SPAN}-01"}
    body = {"model": server.model, "prompt": "Once", "max_tokens": 40, "ignore_eos": True}
    answer = server.api.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "order-17"
    assert "order-17" in answer.json()["id"]
    server.wait_until("the decision", lambda: "order-17" in server.admin.get("/outrider/why").text)
    server.wait_until("the engine's span", lambda: bool(receiver.named("llm_request", TRACE)))
    server.wait_until("the gate's span", lambda: bool(receiver.named("outrider.request", TRACE)))
    (gate,), (engine,) = receiver.named("outrider.request", TRACE), receiver.named("llm_request", TRACE)
    assert gate.parent_id == CLIENTS_SPAN
    assert engine.parent_id == gate.span_id
    assert "order-17" in engine.attributes["gen_ai.request.id"]
    assert gate.service == engine.service == "smollm2"
