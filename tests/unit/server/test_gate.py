"""The gate in front of the engine's app, over a small ASGI app that shows what reached it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import httpx
import pytest
from outrider_runtime.server import gate
from outrider_runtime.server.gate import MAX_BODY_BYTES, GateFacts, RequestGate

CHAT = "/v1/chat/completions"


class Engine:
    """Answers every request in two chunks and keeps what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.lifespans = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self.lifespans += 1
            return
        message = await receive()
        self.bodies.append(message["body"])
        self.headers.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-engine", b"yes")]})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        await send({"type": "http.response.body", "body": b"two", "more_body": False})


class Service:
    """The gate over an engine, and a client of it."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.facts = GateFacts(slo_classes=("interactive", "batch"), draining=False)
        self.gate = RequestGate(self.engine, lambda: self.facts)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.gate), base_url="http://pod")

    async def post(self, body: object, path: str = CHAT, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def reached(self) -> dict[str, Any]:
        document = json.loads(self.engine.bodies[-1])
        assert isinstance(document, dict)
        return document


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    yield made
    await made.client.aclose()


async def test_request_without_class_reaches_engine_byte_for_byte(service: Service) -> None:
    """The gate does not rewrite what it does not have to."""
    body = b'{ "prompt" : "\xc3\xa9\\u00e9", "n":1}'
    answer = await service.client.post(CHAT, content=body)
    assert answer.status_code == 200
    assert service.engine.bodies == [body]


async def test_header_reaches_the_engine_as_xargs(service: Service) -> None:
    """vLLM hands vllm_xargs to the scheduler; headers end at the API server."""
    await service.post({"prompt": "x"}, X_SLO_Class="batch")
    assert service.reached() == {"prompt": "x", "vllm_xargs": {"slo_class": "batch"}}
    assert int(service.engine.headers[-1][b"content-length"]) == len(service.engine.bodies[-1])


async def test_own_slo_in_llm_d_headers_reaches_the_engine(service: Service) -> None:
    """The gateway's times replace a class in the client's body, but not a class in a header."""
    body = {"prompt": "x", "vllm_xargs": {"slo_class": "batch"}}
    await service.post(body, x_llm_d_slo_tpot_ms="30", X_LLM_D_SLO_TTFT_MS="1500.5")
    assert service.reached()["vllm_xargs"] == {"slo_tpot_ms": 30.0, "slo_ttft_ms": 1500.5}
    await service.post(body, x_llm_d_slo_tpot_ms="30", X_SLO_Class="interactive")
    assert service.reached()["vllm_xargs"]["slo_class"] == "interactive"


@pytest.mark.parametrize("value", ["", "fast", "0", "-5", "nan", "inf", "1e99", "30, 40"])
async def test_own_slo_that_is_no_time_is_refused_by_name(service: Service, value: str) -> None:
    answer = await service.post({"prompt": "x"}, x_llm_d_slo_tpot_ms=value)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-llm-d-slo-tpot-ms"
    assert service.engine.bodies == []


async def test_own_slo_in_the_body_is_refused(service: Service) -> None:
    assert (await service.post({"prompt": "x", "vllm_xargs": {"slo_tpot_ms": 1.0}})).status_code == 400


async def test_answer_streams_chunk_by_chunk(service: Service) -> None:
    """A buffering gate would break streaming."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await service.gate({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, send)
    assert [message.get("body") for message in sent] == [None, b"one ", b"two"]
    assert sent[1]["more_body"]


async def test_engine_sees_that_the_client_disconnected(service: Service) -> None:
    """vLLM aborts a request whose client is gone: it waits on `receive` after the body."""
    seen: list[str] = []

    async def engine(_scope: Any, receive: Any, _send: Any) -> None:
        seen.append((await receive())["type"])
        seen.append((await receive())["type"])

    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"{}", "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop(0)

    async def send(_message: Any) -> None:
        raise AssertionError("nothing to say to a client that is gone")

    gate = RequestGate(engine, lambda: service.facts)
    await gate({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, send)
    assert seen == ["http.request", "http.disconnect"]


async def test_client_that_leaves_mid_body_gets_no_answer(service: Service) -> None:
    """No answer, no error, nothing for the engine."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop(0)

    async def send(_message: Any) -> None:
        raise AssertionError("nothing to say to a client that is gone")

    await service.gate({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, send)
    assert service.engine.bodies == []


@pytest.mark.parametrize(
    ("body", "headers", "param", "sentence"),
    [
        (b"{", {}, None, "not JSON"),
        (b"{}", {"X-SLO-Class": "gold"}, "X-SLO-Class", "known classes: interactive, batch"),
        (b'{"vllm_xargs": {"slo_class": "gold"}}', {}, "vllm_xargs.slo_class", "known classes: interactive, batch"),
        (b'{"temperature": NaN}', {}, "temperature", "NaN"),
        (b'{"a": ' + b"[" * 150 + b"]" * 150 + b"}", {"X-SLO-Class": "batch"}, "a", "nested too deeply"),
        (b'{"n": 1000000}', {}, "n", "at most 128 choices"),
    ],
)
async def test_refused_request_gets_an_openai_style_error(
    service: Service, body: bytes, headers: dict[str, str], param: str | None, sentence: str
) -> None:
    """Issue 3: a 4xx with an OpenAI-style error body; the engine sees nothing of it."""
    answer = await service.client.post(CHAT, content=body, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 400
    assert error["type"] == "BadRequestError"
    assert error["param"] == param
    assert sentence in error["message"]
    assert service.engine.bodies == []


async def test_removed_class_is_refused_at_the_next_request(service: Service) -> None:
    """SLO classes are hot: the gate follows the config in force."""
    assert (await service.post({}, X_SLO_Class="batch")).status_code == 200
    service.facts = GateFacts(slo_classes=("interactive",), draining=False)
    assert (await service.post({}, X_SLO_Class="batch")).status_code == 400


async def test_an_adapter_that_is_not_loaded_is_unavailable(service: Service) -> None:
    """vLLM would say that there is no such model; a client may try again. Other names and types are vLLM's to judge."""
    service.facts = GateFacts(slo_classes=(), draining=False, missing_adapters=frozenset({"support"}))
    answer = await service.post({"model": "support"})
    assert answer.status_code == 503
    assert answer.json()["error"]["param"] == "model"
    assert "adapter 'support' is not loaded" in answer.json()["error"]["message"]
    for model in ("other", ["support"], {"support": 1}, None):
        assert (await service.post({"model": model})).status_code == 200


async def test_draining_pod_serves_and_closes_connections(service: Service) -> None:
    """Endpoints take a while to forget a pod: requests are served, connections are not kept."""
    service.facts = GateFacts(slo_classes=(), draining=True)
    answer = await service.post({"prompt": "x"})
    assert answer.status_code == 200
    assert answer.headers["connection"] == "close"


async def test_metrics_and_raw_engine_routes_are_closed_to_clients(service: Service) -> None:
    """State, metrics and probes on an admin port that the Service does not expose."""
    for path in ("/metrics", "/inference/v1/generate", "/v1/load_lora_adapter", "/scale_elastic_ep", "/invocations"):
        answer = await service.client.post(path, content=b"{}")
        assert answer.status_code == 404, path
        assert answer.json()["error"]["type"] == "NotFoundError"
    assert (await service.client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_tokenizer_requests_are_strict_json(service: Service, path: str) -> None:
    """Bug: a tokenizer that gets half of a character raises, which was a 500."""
    answer = await service.client.post(path, content=b'{"prompt": "\\ud800"}', headers={"X-SLO-Class": "gold"})
    assert answer.status_code == 400
    assert "at line 1 column" in answer.json()["error"]["message"]
    assert service.engine.bodies == []
    body = b'{ "prompt" : "x"}'
    assert (await service.client.post(path, content=body, headers={"X-SLO-Class": "gold"})).status_code == 200
    assert service.engine.bodies == [body]


async def test_body_over_the_limit_is_refused_while_it_is_read(service: Service) -> None:
    """One client must not be able to fill the pod's memory."""
    chunk = b"x" * (1 << 20)
    received = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal received
        for _ in range(MAX_BODY_BYTES // len(chunk) + 10):
            received += 1
            yield chunk

    answer = await service.client.post(CHAT, content=body())
    assert answer.status_code == 413
    assert "64 MiB" in answer.json()["error"]["message"]
    assert received <= MAX_BODY_BYTES // len(chunk) + 2


async def test_body_that_never_ends_is_a_timeout(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a half-sent body kept its connection open for ever."""
    monkeypatch.setattr(gate, "BODY_TIMEOUT_S", 0.1)

    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    answer = await service.client.post(CHAT, content=body())
    assert answer.status_code == 408
    assert answer.headers["connection"] == "close"
    assert service.engine.bodies == []


async def test_websocket_is_closed(service: Service) -> None:
    """vLLM's own realtime route stays closed, as every route that is not named open."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await service.gate({"type": "websocket", "path": "/v1/realtime"}, None, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert service.engine.bodies == []


async def test_lifespan_of_the_engines_app_runs(service: Service) -> None:
    """vLLM's app starts its background tasks there."""
    await service.gate({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert service.engine.lifespans == 1
