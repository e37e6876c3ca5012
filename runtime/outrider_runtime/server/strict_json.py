"""Parses JSON as RFC 8259 defines it, more strictly than Python does.

Refused are: text that is not UTF-8, NaN and Infinity, numbers too large for a double, half surrogate pairs, integers
over 64 bits (except in fields that become text of the prompt), and deep nesting. Python's parser, which vLLM uses,
accepts all of these. A NaN temperature would reach the sampler; larger integers and half surrogate pairs cannot be
sent to the engine's process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from outrider_runtime.server.server_errors import RequestError

MAX_NESTING = 100
"""Lists and objects inside one another, in one field. Python's JSON parser and writer fail at some hundreds."""
_LARGEST = 10**308
"""Integers from here on fit no double."""
_PROMPT_FIELDS = frozenset({"tools", "functions", "messages", "input", "documents"})
"""Fields that become text of the prompt. Any integer may occur there: schemas of tools use the bound 2^64 - 1, and the
arguments of earlier calls hold identifiers."""
_SCHEMA_FIELDS = frozenset({"response_format", "structured_outputs", "text"})
"""Fields with a schema that the engine compiles. They may hold integers of up to 64 bits, signed or unsigned."""


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises RequestError (400) that says what is wrong and where.

    A body of many megabytes takes seconds, so this must not run in the event loop.
    """
    try:
        document = from_json(body)  # NaN and Infinity too, which are refused with the name of their field
    except ValueError as error:
        if "recursion limit" in str(error):
            raise RequestError("the body is nested too deeply") from None
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise RequestError(f"the body must be a JSON object, not {_type_name(document)}")
    for field, value in document.items():
        _check_values(field, value)
    return document


def _check_values(field: str, value: Any) -> None:
    """Raise RequestError for a number that is refused or for deep nesting. Goes level by level, without recursion."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        fault = next(filter(None, (_fault(field, item) for item in level)), None)
        if fault is not None:
            raise RequestError(f"{field} contains {fault}", field)
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return
        level = [item for container in containers for item in _items(container)]
    raise RequestError(f"{field} is nested too deeply: more than {MAX_NESTING} lists and objects", field)


def _items(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _fault(field: str, value: Any) -> str | None:
    """Return what is wrong with a number; None when nothing is, or `value` is no number."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{json.dumps(value)}: NaN, or a number that is too large; send a finite one"
    if not isinstance(value, int) or -(2**63) <= value < 2**63 or _is_accepted(field, value):
        return None
    return f"{str(value)[:40]}, a number that is too large"


def _is_accepted(field: str, value: int) -> bool:
    if field in _PROMPT_FIELDS:
        return abs(value) < _LARGEST
    return field in _SCHEMA_FIELDS and 0 <= value < 2**64


def _type_name(document: object) -> str:
    names: dict[type, str] = {list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(document), "a number" if isinstance(document, int | float) else "null")
