"""ASGI middleware behind the gate: answers 400 to a JSON schema that the engine cannot follow.

vLLM checks a schema with a second compiler if the first refuses it, but its engine compiles with the first one only.
It compiles a schema without a finite instance, too, and then finds no token to go on with. Without these checks such
requests would end in a 500 without a reason.
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
MOST_REFERENCES = 200
"""Rounds of the search for endless rules: its time must not grow with the square of a schema."""
_RULE, _SEQUENCE, _CHOICES, _REPEATED = 4, 5, 6, 8
"""xgrammar's numbers for the expressions of a grammar that refer to other ones; all others are texts."""
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


def schema_compiler(backend: str) -> Compiler | None:
    """Return a check by vLLM's compiler for JSON schemas; None if vLLM's own check uses the same one."""
    if backend not in ("auto", "xgrammar"):
        return None
    from xgrammar import Grammar

    def compile_schema(schema: str) -> None:
        grammar = Grammar.from_json_schema(schema)
        if "$" in schema:  # only a schema that refers to itself can be endless
            check_finite(json.loads(grammar.serialize_json()))

    return compile_schema


def check_finite(grammar: dict[str, Any]) -> None:
    """Raise ValueError if a rule of the grammar has no finite text: an answer that comes to it never ends.

    A rule is finite if one of its forms refers to finite rules only; each round finds further ones. grammar: as
    xgrammar serialises it.
    """
    bodies = [rule[1] for rule in grammar["rules"]]
    data, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
    finite: set[int] = set()

    def is_finite(expression: int) -> bool:
        kind, count = data[starts[expression] : starts[expression] + 2]
        parts = data[starts[expression] + 2 : starts[expression] + 2 + count]
        if kind in (_SEQUENCE, _CHOICES):
            return (all if kind == _SEQUENCE else any)(map(is_finite, parts))
        if kind == _REPEATED and parts[1] == 0:
            return True
        return kind not in (_RULE, _REPEATED) or parts[0] in finite

    for _ in range(MOST_REFERENCES):
        further = {rule for rule, body in enumerate(bodies) if rule not in finite and is_finite(body)}
        finite |= further
        if not further:
            break
    if len(finite) < len(bodies):
        raise ValueError(
            f"no finite value satisfies a part of it, or over {MOST_REFERENCES} references follow each other"
        )


def _schemas(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each schema's field and its JSON text. A field of an unexpected type is left to the engine's checks."""
    if _calls_a_tool(document.get("tool_choice")):
        yield from _tool_schemas(document.get("tools"))
    for field, path in _SCHEMA_PATHS.items():
        value: Any = document.get(field)
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, dict):
            yield field, json.dumps(value)
        elif isinstance(value, str) and _is_json(value):
            yield field, value


def _calls_a_tool(choice: Any) -> bool:
    """Return whether the answer must be a tool call, which a grammar of the tools' schemas enforces."""
    return choice in ("required", "any") or (isinstance(choice, dict) and choice.get("type") not in ("auto", "none"))


def _tool_schemas(tools: Any) -> Iterator[tuple[str, str]]:
    """Yield the schemas of tools as chat completions, responses and messages have them."""
    for number, tool in enumerate(tools if isinstance(tools, list) else []):
        described = tool if isinstance(tool, dict) else {}
        function = described.get("function")
        for owner, path in ((function, "function.parameters"), (described, "parameters"), (described, "input_schema")):
            schema = owner.get(path.rpartition(".")[2]) if isinstance(owner, dict) else None
            if isinstance(schema, dict):
                yield f"tools[{number}].{path}", json.dumps(schema)


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
