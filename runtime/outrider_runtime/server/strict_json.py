"""JSON as RFC 8259 has it: UTF-8, no NaN, no Infinity, no number beyond a double, no integer beyond 64 bits, no half of
a surrogate pair.

Python's parser (and so the engine's) takes them. A NaN temperature or penalty would reach the sampler, and neither a
larger integer nor half a character can cross to the engine's process.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from outrider_runtime.server.errors import RequestError

_INT64_DIGITS = len(str(-(2**63)))


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises RequestError (400) that says what is wrong and where."""
    try:
        text = body.decode("utf-8")
        document = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_int64)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    if not isinstance(document, dict):
        raise RequestError(f"the body must be a JSON object, not {_kind(document)}")
    if "\\u" in text:  # only an escape can hide half of a pair in UTF-8
        _check_characters(document)
    return document


def _check_characters(document: dict[str, Any]) -> None:
    for name, value in document.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            field = name.encode("ascii", "backslashreplace").decode()
            sentence = f"{field} holds {half}, half of a surrogate pair; send whole characters"
            raise RequestError(sentence, field) from None


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body holds {name}, which is not a JSON number; send a finite one")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise RequestError(f"the number {text[:40]} in the body is too large")
    return number


def _int64(text: str) -> int:
    number = int(text) if len(text) <= _INT64_DIGITS else None
    if number is None or not -(2**63) <= number < 2**63:
        raise RequestError(f"the number {text[:40]} in the body is too large")
    return number


def _kind(document: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(document), "null")
