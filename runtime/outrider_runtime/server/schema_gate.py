"""ASGI middleware behind the gate: schemas of answers that the engine's grammar compiler refuses are a 400.

vLLM asks another compiler where its first one refuses, and then compiles with the one that its engine began with: such
a request ended in a 500 without a word of why.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from outrider_runtime.server.errors import RequestError
from outrider_runtime.server.gate import DOCUMENT, App, Receive, Scope, Send, refuse

Compiler = Callable[[str], None]
"""Raises RuntimeError or ValueError for a JSON schema that it cannot compile."""
_PLACES = {
    "response_format": ("json_schema", "schema"),
    "structured_outputs": ("json",),
    "text": ("format", "schema"),
}
"""Field of a request -> where in it a schema stands."""
_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
"""xgrammar's messages begin with a time and a line of its source."""


class SchemaGate:
    """Refuses a request with the field of the schema that does not compile; passes the rest on."""

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
                why = _SOURCE_PLACE.sub("", str(error).strip()).rstrip(".")
                raise RequestError(f"{field}: its JSON schema cannot be compiled: {why}", field) from None


def _schemas(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Field and JSON text; what has another shape is the engine's to judge."""
    for field, places in _PLACES.items():
        value: Any = document.get(field)
        for place in places:
            value = value.get(place) if isinstance(value, dict) else None
        if isinstance(value, dict):
            yield field, json.dumps(value)
        elif isinstance(value, str) and _is_json(value):
            yield field, value


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
