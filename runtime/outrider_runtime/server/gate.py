"""ASGI middleware around the routes of an engine's OpenAI app: what a request must pass before the engine sees it.

It reads a request's body once, checks it, notes the SLO class, and hands the same bytes on (new ones only where the
class came from the header). Responses pass through untouched, so streaming is vLLM's own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from outrider_crds.runtime_config import SLO_CLASS_HEADER, SLO_LIMIT_HEADERS

from outrider_runtime.server.errors import RequestError
from outrider_runtime.server.limits import check_request
from outrider_runtime.server.slo import with_slo_class, with_slo_limits
from outrider_runtime.server.strict_json import parse_object

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATE_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/messages"}
)
TEXT_PATHS = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})
"""They take JSON, and ask nothing of the engine."""
OPEN_PATHS = frozenset({"/v1/models", "/health", "/ping", "/version"})
"""Everything else that vLLM serves (metrics, adapters, raw sampling parameters, scaling) stays inside the pod."""
OPEN_PREFIXES = ("/v1/responses/",)
MAX_BODY_BYTES = 64 * 1024 * 1024
POLICY_VIOLATION = 1008
"""WebSocket close code (RFC 6455)."""

DOCUMENT = "outrider.document"
"""Key of the ASGI scope under which the app finds the body, parsed and checked."""

_HEADER = SLO_CLASS_HEADER.lower().encode()


@dataclass(frozen=True, slots=True)
class GateFacts:
    """What the gate needs to know at the moment of a request."""

    slo_classes: tuple[str, ...]
    draining: bool


class RequestGate:
    """Refuses what must not reach the engine with an OpenAI-style error; passes the rest on."""

    def __init__(self, app: App, facts: Callable[[], GateFacts]) -> None:
        self._app = app
        self._facts = facts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})  # speech models; none is served here
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # the lifespan of vLLM's app
            return
        facts = self._facts()
        if facts.draining:
            send = _closing(send)
        try:
            receive = await self._checked(scope, receive, facts)
        except RequestError as error:
            await refuse(error, send)
        except _ClientLeftError:
            return
        else:
            await self._app(scope, receive, send)

    async def _checked(self, scope: Scope, receive: Receive, facts: GateFacts) -> Receive:
        path = route_path(scope)
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
            return receive
        if path not in GENERATE_PATHS | TEXT_PATHS:
            raise RequestError(f"there is no {path} here", status=HTTPStatus.NOT_FOUND)
        if scope["method"] != "POST":
            return receive  # vLLM's router answers 405
        # A body of many megabytes takes seconds, in which other requests and probes are answered.
        body, scope[DOCUMENT] = await asyncio.to_thread(_admitted, await _read_body(receive), scope, facts)
        return _replay(body, receive)


def route_path(scope: Scope) -> str:
    """The path below the app's root path (`--root-path`), as the router sees it: both spellings are served."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _admitted(body: bytes, scope: Scope, facts: GateFacts) -> tuple[bytes, dict[str, Any]]:
    """The body that the engine gets, and what it holds."""
    document = parse_object(body)
    if route_path(scope) in TEXT_PATHS:
        return body, document
    names = _values(scope, _HEADER)
    limits = {name: _values(scope, name.encode()) for name in SLO_LIMIT_HEADERS}
    classed = with_slo_limits(
        with_slo_class(document, names, facts.slo_classes), limits, is_class_in_header=bool(names)
    )
    check_request(classed)
    return body if classed is document else _rewrite(scope, classed), classed


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]


class _ClientLeftError(Exception):
    """The client hung up before its request was complete."""


async def _read_body(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeftError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            limit = f"{MAX_BODY_BYTES >> 20} MiB"
            raise RequestError(f"the body is larger than {limit}", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _rewrite(scope: Scope, document: dict[str, Any]) -> bytes:
    """The new body; its length goes into the headers, which some parsers trust."""
    body = json.dumps(document).encode()
    kept = [(name, value) for name, value in scope["headers"] if name not in (b"content-length", b"transfer-encoding")]
    scope["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """First the whole body, then whatever the client does next: vLLM waits there for a disconnect."""
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _closing(send: Send) -> Send:
    """Answers carry `Connection: close`, so that pooled clients move to another pod before this one goes."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        await send(message)

    return closing


async def refuse(error: RequestError, send: Send) -> None:
    """Answer with `error`."""
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": error.status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})
