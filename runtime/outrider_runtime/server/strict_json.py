"""JSON as RFC 8259 has it: UTF-8, no NaN, no Infinity, no number beyond a double, no integer beyond 64 bits, no half of
a surrogate pair; and nested no deeper than a request needs.

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
_INT64_DIGITS = len(str(-(2**63)))


@dataclass(frozen=True, slots=True)
class _Unfit:
    """Stands in a document for what is no number of JSON, or too large a one."""

    text: str


_NOTED = (dict, list, _Unfit)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises RequestError (400) that says what is wrong and where.

    A body of many megabytes takes seconds: not for the event loop.
    """
    try:
        text = body.decode("utf-8")
        document = json.loads(text, parse_constant=_Unfit, parse_float=_finite, parse_int=_int64)
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
        unfit = next((one for one in level if isinstance(one, _Unfit)), None)
        if unfit is not None:
            raise RequestError(f"{field} holds {unfit.text}, {_fault(unfit)}", field)
        level = [inner for one in level for inner in _within(one)]
    raise RequestError(f"{field} is nested too deeply: in more than {MOST_NESTED} lists and objects", field)


def _within(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _fault(unfit: _Unfit) -> str:
    is_number = unfit.text.lstrip("-")[0].isdigit()
    return "a number that is too large" if is_number else "which is not a JSON number; send a finite one"


def _check_characters(field: str, name: str, value: Any) -> None:
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise RequestError(f"{field} holds {half}, half of a surrogate pair; send whole characters", field) from None


def _finite(text: str) -> float | _Unfit:
    number = float(text)
    return number if math.isfinite(number) else _Unfit(text[:40])


def _int64(text: str) -> int | _Unfit:
    number = int(text) if len(text) <= _INT64_DIGITS else None
    return _Unfit(text[:40]) if number is None or not -(2**63) <= number < 2**63 else number


def _kind(document: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", _Unfit: "a number"}
    return kinds.get(type(document), "null")
