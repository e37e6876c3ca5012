"""ASGI middleware behind the gate: answers 400 to a JSON schema that the engine's grammar compiler refuses.

vLLM checks a schema with a second compiler if the first refuses it, but its engine compiles with the first one only.
Without this check such a request would end in a 500 without a reason.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from outrider_runtime.server.gate import DOCUMENT, App, Receive, Scope, Send, refuse
from outrider_runtime.server.server_errors import RequestError

Compiler = Callable[[str], None]
"""Raises RuntimeError or ValueError for a JSON schema that it cannot compile."""
_SCHEMA_PATHS = {
    "response_format": ("json_schema", "schema"),
    "structured_outputs": ("json",),
    "text": ("format", "schema"),
}
"""Field of a request -> path of the schema within that field."""
_SOURCE_POSITION = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
"""Prefix of xgrammar's messages, which is for its developers: a time, a source line, the condition that failed."""


class SchemaGate:
    """Refuses a request whose schema does not compile, naming the field; passes other requests on."""

    def __init__(self, app: App, compiler: Compiler) -> None:
        self._app = app
        self._compiler = compiler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        schemas = list(_schemas(scope.get(DOCUMENT) or {}))
        try:
            if schemas:
                await asyncio.to_thread(self._check, schemas)
        except RequestError as error:
            await refuse(error, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, schemas: list[tuple[str, str]]) -> None:
        for field, schema in schemas:
            try:
                self._compiler(schema)
            except (RuntimeError, ValueError) as error:
                reason = _SOURCE_POSITION.sub("", str(error).strip()).rstrip(".")
                raise RequestError(f"the JSON schema in {field} cannot be compiled: {reason}", field) from None


def _schemas(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each schema's field and its JSON text. A field of an unexpected type is left to the engine's checks."""
    for field, path in _SCHEMA_PATHS.items():
        value: Any = document.get(field)
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, dict):
            yield field, json.dumps(value)
        elif isinstance(value, str) and _is_json(value):
            yield field, value


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
