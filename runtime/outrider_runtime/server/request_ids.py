"""The id of a request: the client's X-Request-Id, or a new one. Engine, answer, logs and traces carry it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

REQUEST_ID_HEADER = b"x-request-id"
_USABLE = re.compile(rb"[!-~]{1,128}")
"""Visible ASCII: an id stands in log lines and in the ids of answers."""

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


def identify(scope: MutableMapping[str, Any]) -> str:
    """Return the request's id. A request with none, or with one that cannot be used, gets a new one in its headers."""
    values = [value for name, value in scope["headers"] if name == REQUEST_ID_HEADER]
    if len(values) == 1 and _USABLE.fullmatch(values[0]):
        return str(values[0], "ascii")
    made = uuid.uuid4().hex
    replace_headers(scope, {REQUEST_ID_HEADER: made.encode()})
    return made


def replace_headers(scope: MutableMapping[str, Any], headers: dict[bytes, bytes]) -> None:
    """Set `headers` of the request in the place of all that have their names."""
    kept = [(name, value) for name, value in scope["headers"] if name not in headers]
    scope["headers"] = [*kept, *headers.items()]


def with_request_id(send: Send, request_id: str) -> Send:
    """Add the id to the answer's headers."""
    header = (REQUEST_ID_HEADER, request_id.encode())

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), header]}
        await send(message)

    return send_with_id
