"""JSON as RFC 8259 has it: UTF-8, no NaN, no Infinity, no number beyond a double, no half of a surrogate pair; no
integer beyond 64 bits but in what the prompt shows as text; and nested no deeper than a request needs.

Python's parser (and so the engine's) takes them. A NaN temperature or penalty would reach the sampler, and neither a
larger integer nor half a character can cross to the engine's process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outrider_runtime.server.errors import RequestError

MOST_NESTED = 100
"""Lists and objects within each other, in one field. Python's parsers and writers raise at some hundreds."""
_MOST_DIGITS = 308
"""Digits of an integer: more are beyond a double, and Python takes a time that grows with their square."""
_TEXT = frozenset({"tools", "functions", "messages", "input", "documents"})
"""Fields that become text of the prompt, where any integer may stand: tools' schemas bound numbers by 2^64 - 1, and the
arguments of earlier calls hold identifiers."""
_SCHEMAS = frozenset({"response_format", "structured_outputs", "text"})
"""Fields with a schema that the engine compiles. It gets integers of up to 64 bits, with or without a sign."""


_NOT_A_NUMBER = "which is not a JSON number; send a finite one"


@dataclass(frozen=True, slots=True)
class _Unfit:
    """Stands in a document for what is no number of JSON, or too large a one."""

    text: str


class _Large(int):
    """An integer of more than 63 bits and a sign."""


_NOTED = (dict, list, _Unfit, _Large)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises RequestError (400) that says what is wrong and where.

    A body of many megabytes takes seconds: not for the event loop.
    """
    try:
        text = body.decode("utf-8")
        document = json.loads(text, parse_constant=_Unfit, parse_float=_finite, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    if not isinstance(document, dict):
        raise RequestError(f"the body must be a JSON object, not {_kind(document)}")
    for name, value in document.items():
        field = name.encode("ascii", "backslashreplace").decode()
        _check_values(field, value)
        if "\\u" in text:  # only an escape can hide half of a pair in UTF-8
            _check_characters(field, name, value)
    return document


def _check_values(field: str, value: Any) -> None:
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [one for one in level if isinstance(one, _NOTED)]
        if not level:
            return
        fault = next(filter(None, (_fault(field, one) for one in level)), None)
        if fault is not None:
            raise RequestError(f"{field} holds {fault}", field)
        level = [inner for one in level if isinstance(one, dict | list) for inner in _within(one)]
    raise RequestError(f"{field} is nested too deeply: in more than {MOST_NESTED} lists and objects", field)


def _within(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _fault(field: str, value: Any) -> str | None:
    if isinstance(value, _Large) and not _is_taken(field, value):
        return f"{str(value)[:40]}, a number that is too large"
    if not isinstance(value, _Unfit):
        return None
    is_number = value.text.lstrip("-")[0].isdigit()
    return f"{value.text}, {'a number that is too large' if is_number else _NOT_A_NUMBER}"


def _is_taken(field: str, value: int) -> bool:
    return field in _TEXT or (field in _SCHEMAS and 0 <= value < 2**64)


def _check_characters(field: str, name: str, value: Any) -> None:
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise RequestError(f"{field} holds {half}, half of a surrogate pair; send whole characters", field) from None


def _finite(text: str) -> float | _Unfit:
    number = float(text)
    return number if math.isfinite(number) else _Unfit(text[:40])


def _integer(text: str) -> int | _Unfit:
    if len(text.lstrip("-")) > _MOST_DIGITS:
        return _Unfit(text[:40])
    number = int(text)
    return number if -(2**63) <= number < 2**63 else _Large(number)


def _kind(document: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", _Unfit: "a number"}
    return kinds.get(type(document), "null")
