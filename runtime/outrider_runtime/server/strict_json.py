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
from dataclasses import dataclass
from typing import Any

from outrider_runtime.server.server_errors import RequestError

MAX_NESTING = 100
"""Lists and objects inside one another, in one field. Python's JSON parser and writer fail at some hundreds."""
_MAX_DIGITS = 308
"""Digits of an integer. More do not fit a double, and Python's parsing time grows with their square."""
_PROMPT_FIELDS = frozenset({"tools", "functions", "messages", "input", "documents"})
"""Fields that become text of the prompt. Any integer may occur there: schemas of tools use the bound 2^64 - 1, and the
arguments of earlier calls hold identifiers."""
_SCHEMA_FIELDS = frozenset({"response_format", "structured_outputs", "text"})
"""Fields with a schema that the engine compiles. They may hold integers of up to 64 bits, signed or unsigned."""
_NOT_A_NUMBER = "which is not a JSON number; send a finite one"


@dataclass(frozen=True, slots=True)
class _InvalidNumber:
    """Placeholder in a parsed document for NaN, Infinity or a number that is too large."""

    text: str


class _LargeInteger(int):
    """An integer that does not fit 64 signed bits."""


_CHECKED_TYPES = (dict, list, _InvalidNumber, _LargeInteger)
"""Types of values that may be refused, or hold such values; all others pass."""


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises RequestError (400) that says what is wrong and where.

    A body of many megabytes takes seconds, so this must not run in the event loop.
    """
    try:
        text = body.decode("utf-8")
        document = json.loads(text, parse_constant=_InvalidNumber, parse_float=_finite, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    if not isinstance(document, dict):
        raise RequestError(f"the body must be a JSON object, not {_type_name(document)}")
    for name, value in document.items():
        field = name.encode("ascii", "backslashreplace").decode()
        _check_values(field, value)
        if "\\u" in text:  # valid UTF-8 has half a surrogate pair only as an escape
            _check_characters(field, name, value)
    return document


def _check_values(field: str, value: Any) -> None:
    """Raise RequestError for a number that is refused or for deep nesting. Goes level by level, without recursion."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [item for item in level if isinstance(item, _CHECKED_TYPES)]
        if not level:
            return
        fault = next(filter(None, (_fault(field, item) for item in level)), None)
        if fault is not None:
            raise RequestError(f"{field} contains {fault}", field)
        level = [inner for item in level if isinstance(item, dict | list) for inner in _items(item)]
    raise RequestError(f"{field} is nested too deeply: more than {MAX_NESTING} lists and objects", field)


def _items(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _fault(field: str, value: Any) -> str | None:
    """Return what is wrong with a number; None when nothing is, or `value` is no number."""
    if isinstance(value, _LargeInteger) and not _is_accepted(field, value):
        return f"{str(value)[:40]}, a number that is too large"
    if not isinstance(value, _InvalidNumber):
        return None
    is_number = value.text.lstrip("-")[0].isdigit()
    return f"{value.text}, {'a number that is too large' if is_number else _NOT_A_NUMBER}"


def _is_accepted(field: str, value: int) -> bool:
    return field in _PROMPT_FIELDS or (field in _SCHEMA_FIELDS and 0 <= value < 2**64)


def _check_characters(field: str, name: str, value: Any) -> None:
    """Raise RequestError if the field's name or a string in its value has half of a surrogate pair."""
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise RequestError(f"{field} contains {half}, half of a surrogate pair; send whole characters", field) from None


def _finite(text: str) -> float | _InvalidNumber:
    number = float(text)
    return number if math.isfinite(number) else _InvalidNumber(text[:40])


def _integer(text: str) -> int | _InvalidNumber:
    if len(text.lstrip("-")) > _MAX_DIGITS:
        return _InvalidNumber(text[:40])
    number = int(text)
    return number if -(2**63) <= number < 2**63 else _LargeInteger(number)


def _type_name(document: object) -> str:
    names: dict[type, str] = {list: "a list", str: "a string", bool: "a boolean"}
    is_number = isinstance(document, int | float | _InvalidNumber)
    return names.get(type(document), "a number" if is_number else "null")
