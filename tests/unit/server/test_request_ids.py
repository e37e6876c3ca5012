"""X-Request-Id and traces: what a request carries through the gate."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from outrider_runtime.server.gate import GateFacts, RequestGate
from outrider_runtime.server.request_traces import RequestTraces, request_traces, trace_arguments, trace_environment

from tests.otlp_receiver import receiving

CHAT = "/v1/chat/completions"
TRACE, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BASE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
WEB = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}


class Engine:
    """Answers every request, and keeps the headers that it was sent."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await receive()
        self.headers = list(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def values(self, name: bytes) -> list[str]:
        return [value.decode() for key, value in self.headers if key == name]


async def post(engine: Engine, headers: list[tuple[str, str]], traces: RequestTraces | None = None, **body: Any) -> Any:
    gate = RequestGate(engine, lambda: GateFacts(("chat",), draining=False), traces)
    transport = httpx.ASGITransport(app=gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        return await client.post(CHAT, json={"prompt": "x", **body}, headers=headers)


async def test_a_clients_request_id_reaches_engine_and_answer() -> None:
    """vLLM makes the answer's id of it: `chatcmpl-<X-Request-Id>`."""
    engine = Engine()
    answer = await post(engine, [("X-Request-Id", "order-17")])
    assert engine.values(b"x-request-id") == ["order-17"]
    assert answer.headers.get_list("x-request-id") == ["order-17"]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("X-Request-Id", "")],
        [("X-Request-Id", "a b")],
        [("X-Request-Id", "x" * 129)],
        [("X-Request-Id", "one"), ("X-Request-Id", "two")],
    ],
)
async def test_an_unusable_request_id_is_replaced(headers: list[tuple[str, str]]) -> None:
    """It stands in log lines and in ids: engine and answer have one, and the same."""
    engine = Engine()
    answer = await post(engine, headers)
    (made,) = engine.values(b"x-request-id")
    assert len(made) == 32
    assert answer.headers.get_list("x-request-id") == [made]


async def test_a_refusal_has_the_id_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """A client that reports an error can be found in the log; its words do not look like further lines."""
    with caplog.at_level(logging.INFO):
        answer = await post(Engine(), [("X-Request-Id", "order-17")], vllm_xargs={"a\nrequest": 1})
    assert answer.status_code == 400
    assert answer.headers["x-request-id"] == "order-17"
    (line,) = (record.getMessage() for record in caplog.records if "order-17" in record.getMessage())
    assert line.startswith("request order-17 is refused with 400: ")
    assert "\n" not in line


async def test_the_gates_span_is_between_client_and_engine() -> None:
    """A real exporter and a real receiver: the client's trace goes on, and the engine's parent is the gate's span."""
    engine, provider = Engine(), TracerProvider()
    with receiving() as receiver:
        exporter = OTLPSpanExporter(endpoint=f"{receiver.endpoint}/v1/traces")
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        traces = RequestTraces(provider.get_tracer("test"))
        await post(engine, [("X-Request-Id", "order-17"), ("traceparent", f"00-{TRACE}-{CLIENTS_SPAN}-01")], traces)
        await post(engine, [("X-Request-Id", "order-18")], traces, vllm_xargs={"a": 1})
        provider.shutdown()
    passed, refused = receiver.named("outrider.request")
    assert (passed.trace_id, passed.parent_id) == (TRACE, CLIENTS_SPAN)
    assert passed.attributes["gen_ai.request.id"] == "order-17"
    assert passed.attributes["http.response.status_code"] == "200"
    assert engine.values(b"traceparent") == [f"00-{TRACE}-{passed.span_id}-01"]
    assert refused.attributes["http.response.status_code"] == "400"
    assert refused.trace_id != TRACE


@pytest.mark.parametrize(
    ("environ", "arguments", "endpoint", "protocol"),
    [
        ({}, [], None, None),
        (BASE, [], "http://collector:4317", "grpc"),
        (WEB, [], "http://collector:4318/v1/traces", "http/protobuf"),
        (
            {**BASE, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            [],
            "http://collector:4317/v1/traces",
            "http/protobuf",
        ),
        ({**BASE, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:4318/x"}, [], "http://t:4318/x", "http/protobuf"),
        ({**BASE, "OTEL_SDK_DISABLED": "true"}, [], None, None),
        ({**BASE, "OTEL_TRACES_EXPORTER": "none"}, [], None, None),
        (BASE, ["--otlp-traces-endpoint=http://mine:1"], None, "grpc"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[bad"}, [], "http://[bad", "grpc"),
    ],
)
def test_the_standard_variables_configure_the_engine(
    environ: dict[str, str], arguments: list[str], endpoint: str | None, protocol: str | None
) -> None:
    """vLLM reads its own argument alone, and the protocol of traces alone."""
    assert trace_arguments(environ, arguments) == ([f"--otlp-traces-endpoint={endpoint}"] if endpoint else [])
    added = trace_environment(environ, "chat")
    assert added.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") == protocol
    assert ("OTEL_SERVICE_NAME" in added) is (protocol is not None)


def test_a_server_without_traces_has_no_spans() -> None:
    assert request_traces({}) is None
