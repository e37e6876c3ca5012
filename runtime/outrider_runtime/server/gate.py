"""ASGI middleware around the routes of an engine's OpenAI app: checks a request before it reaches the engine.

It reads the request's body once, checks it, finds the SLO class, and passes the same bytes on. The body is rewritten
only when the class came from the header. Responses pass through unchanged, so streaming works as in vLLM.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from outrider_crds.runtime_config import SLO_CLASS_HEADER, SLO_LIMIT_HEADERS

from outrider_runtime.server.limits import check_request
from outrider_runtime.server.request_ids import identify, with_request_id
from outrider_runtime.server.request_traces import RequestTraces
from outrider_runtime.server.server_errors import RequestError
from outrider_runtime.server.slo_header import with_slo_class, with_slo_limits
from outrider_runtime.server.strict_json import parse_object
from outrider_runtime.server.tenant_header import with_tenant

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATE_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/messages"}
)
TEXT_PATHS = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})
"""Paths that take JSON but generate no tokens."""
OPEN_PATHS = frozenset({"/v1/models", "/health", "/ping", "/version"})
"""Paths without a JSON body. Other paths of vLLM (metrics, adapters, raw sampling parameters, scaling) are closed."""
OPEN_PREFIXES = ("/v1/responses/",)
MAX_BODY_BYTES = 64 * 1024 * 1024
"""Larger than a prompt of a million tokens with all its JSON; bounds the memory that one client can take."""
BODY_TIMEOUT_S = 300.0
"""Time in which 64 MiB arrive at 2 Mbit/s."""
LOGGED_CHARACTERS = 300
"""Length of what a log line says of a refused request; its message may quote the request."""
POLICY_VIOLATION = 1008
"""WebSocket close code (RFC 6455)."""

DOCUMENT = "outrider.document"
"""Key of the ASGI scope that holds the parsed and checked body."""

_HEADER = SLO_CLASS_HEADER.lower().encode()


@dataclass(frozen=True, slots=True)
class GateFacts:
    """State of the server that decides what happens to a request."""

    slo_classes: tuple[str, ...]
    """Names of the classes in the current hot config."""
    draining: bool
    missing_adapters: frozenset[str] = frozenset()
    """Names of adapters in the hot config that are not loaded."""


class RequestGate:
    """Answers a request that must not reach the engine with an OpenAI-style error; passes other requests on."""

    def __init__(
        self, app: App, facts: Callable[[], GateFacts], traces: RequestTraces | None = None, *,
        names_tenants: bool = False,
    ) -> None:  # fmt: skip
        """traces: makes a span of each request; None without OpenTelemetry. names_tenants: see `drafters.suffix`."""
        self._app = app
        self._facts = facts
        self._traces = traces
        self._names_tenants = names_tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})  # only speech models use WebSockets
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # start-up and shutdown events of vLLM's app
            return
        request_id = identify(scope)
        send = with_request_id(send, request_id)
        if self._traces is None:
            await self._pass_on(scope, receive, send, request_id)
            return
        with self._traces.begin(scope, request_id) as span:
            await self._pass_on(scope, receive, _note_status(send, span), request_id)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        facts = self._facts()
        if facts.draining:
            send = _with_connection_close(send)
        try:
            receive = await self._check(scope, receive, facts)
        except RequestError as error:
            logger.info("request %s is refused with %d: %s", request_id, error.status, _in_one_line(str(error)))
            await refuse(error, send)
        except ClientLeftError:
            return
        else:
            await self._app(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive, facts: GateFacts) -> Receive:
        path = route_path(scope)
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
            return receive
        if path not in GENERATE_PATHS | TEXT_PATHS:
            raise RequestError(f"this server does not serve {path}", status=HTTPStatus.NOT_FOUND)
        if scope["method"] != "POST":
            return receive  # vLLM's router answers 405
        # In a thread: a body of many megabytes takes seconds, during which other requests must be answered.
        body = await read_in_time(receive)
        body, scope[DOCUMENT] = await asyncio.to_thread(_check_body, body, scope, facts, self._names_tenants)
        return replay_body(body, receive)


def route_path(scope: Scope) -> str:
    """Return the path below the app's root path (`--root-path`). Paths with and without that prefix are served."""
    path = str(scope["path"])
    root = str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _check_body(body: bytes, scope: Scope, facts: GateFacts, names_tenants: bool) -> tuple[bytes, dict[str, Any]]:
    """Return the body to pass to the engine, as bytes and parsed. Raises RequestError."""
    document = parse_object(body)
    if route_path(scope) in TEXT_PATHS:
        return body, document
    model = document.get("model")
    if isinstance(model, str) and model in facts.missing_adapters:
        what = f"the adapter {model!r} is not loaded; status.adapters of the service says why"
        raise RequestError(what, "model", status=HTTPStatus.SERVICE_UNAVAILABLE)
    with_slo = with_slo_of_headers(scope, document, facts.slo_classes)
    check_request(with_slo)
    checked = with_tenant(with_slo, scope["headers"]) if names_tenants else with_slo
    return body if checked is document else rewrite(scope, checked), checked


def with_slo_of_headers(
    scope: Scope, document: dict[str, Any], known: Sequence[str], *, allow_other_names: bool = False
) -> dict[str, Any]:
    """Return the body with the SLO that the request's headers name; the same object without such headers.

    Raises RequestError (400), see `with_slo_class` and `with_slo_limits`.
    """
    class_names = _values(scope, _HEADER)
    limits = {name: _values(scope, name.encode()) for name in SLO_LIMIT_HEADERS}
    with_class = with_slo_class(document, class_names, known, allow_other_names=allow_other_names)
    return with_slo_limits(with_class, limits, is_class_in_header=bool(class_names))


def _values(scope: Scope, header: bytes) -> list[str]:
    """Return the values of all headers with this name (in lower case)."""
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]


class ClientLeftError(Exception):
    """The client disconnected before its request was complete."""


async def read_in_time(receive: Receive) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read_body(receive)
    except TimeoutError:
        late = f"the body was not complete after {BODY_TIMEOUT_S:.0f} s"
        raise RequestError(late, status=HTTPStatus.REQUEST_TIMEOUT) from None


async def _read_body(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            limit = f"{MAX_BODY_BYTES >> 20} MiB"
            raise RequestError(f"the body is larger than {limit}", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def rewrite(scope: Scope, document: dict[str, Any]) -> bytes:
    """Return `document` as a body, and set its length in the request's headers, which some parsers rely on."""
    body = json.dumps(document).encode()
    kept = [(name, value) for name, value in scope["headers"] if name not in (b"content-length", b"transfer-encoding")]
    scope["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
    return body


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the whole body, then the client's next messages: vLLM waits for a disconnect."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _with_connection_close(send: Send) -> Send:
    """Add `Connection: close` to answers, so that clients with connection pools move to another pod."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        await send(message)

    return send_and_close


def _note_status(send: Send, span: Any) -> Send:
    """Note the answer's status on OpenTelemetry's `span`."""

    async def send_and_note(message: Message) -> None:
        if message["type"] == "http.response.start":
            span.set_attribute("http.response.status_code", message["status"])
        await send(message)

    return send_and_note


def _in_one_line(text: str) -> str:
    """A client's words must not look like further lines of the log."""
    return repr(text[:LOGGED_CHARACTERS])[1:-1]


async def refuse(error: RequestError, send: Send) -> None:
    """Answer the request with the document of `error`."""
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": error.status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})
