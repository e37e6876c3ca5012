"""Sentences about schema errors: the field, what is wrong, and what to do."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from outrider_crds.base import DURATION_PATTERN
from outrider_crds.names import (
    ABSOLUTE_PATTERN,
    BUCKET_PATTERN,
    DATA_KEY_PATTERN,
    DOMAIN_PATTERN,
    IMAGE_PATTERN,
    LABEL_KEY_PATTERN,
    LABEL_VALUE_PATTERN,
    MOUNT_PATTERN,
    NAME_PATTERN,
    RESOURCE_PATTERN,
    VARIABLE_PATTERN,
)
from outrider_crds.quantity import QUANTITY_PATTERN
from outrider_crds.schema import JsonObject

Location = Sequence[str | int]


def sentences(error: ValidationError, schema: JsonObject, root: str) -> list[str]:
    """One sentence for each problem in `error`. schema: structural schema of the value at `root`."""
    return [f"{field_path(root, e['loc'])}: {_problem(e, schema)}" for e in error.errors(include_url=False)]


def field_path(root: str, location: Location) -> str:
    """Path of a field: `("draftPool", 0, "eagle")` below `spec` is `spec.draftPool[0].eagle`."""
    return root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def _problem(error: ErrorDetails, schema: JsonObject) -> str:
    describe = _DESCRIBE.get(error["type"])
    if error["type"] == "extra_forbidden":
        return _unknown(error["loc"], schema)
    if describe is None:
        return error["msg"]
    return describe(error.get("ctx", {}), _shorten_value(error["input"]))


def _unknown(location: Location, schema: JsonObject) -> str:
    known = list(_properties(schema, location[:-1]))
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.6)
    remedy = f"write {close[0]!r}" if close else f"remove it; known fields are {', '.join(known)}"
    return f"is not a field: {remedy}"


def _properties(schema: JsonObject, location: Location) -> JsonObject:
    for part in location:
        schema = schema.get("items", {}) if isinstance(part, int) else schema.get("properties", {}).get(part, {})
    properties: JsonObject = schema.get("properties", {})
    return properties


def _shorten_value(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:59] + "…"


def _pattern(context: Mapping[str, Any], shown: str) -> str:
    words = _PATTERN_WORDS.get(context["pattern"])
    return f"must be {words}, but is {shown}" if words else f"is {shown}: it must match {context['pattern']}"


def _choice(context: Mapping[str, Any], shown: str) -> str:
    hint = " (YAML reads a bare On, Off, Yes or No as true or false: put it in quotes)" if shown in _BOOLEANS else ""
    return f"must be {context['expected']}, but is {shown}{hint}"


_PATTERN_WORDS = {
    DURATION_PATTERN: "a duration such as 50ms, 30s or 1m30s",
    NAME_PATTERN: "lower-case letters, digits and '-', with a letter or digit at both ends",
    DOMAIN_PATTERN: "the name of an object: lower-case letters, digits, '-' and '.'",
    LABEL_KEY_PATTERN: "a label key such as zone or example.com/zone",
    LABEL_VALUE_PATTERN: "a label value: at most 63 letters, digits, '-', '_' and '.', a letter or digit at both ends",
    RESOURCE_PATTERN: "an extended resource such as nvidia.com/gpu",
    DATA_KEY_PATTERN: "a key of a Secret or ConfigMap: letters, digits, '-', '_' and '.'",
    VARIABLE_PATTERN: "a variable's name: letters, digits and '_', no digit first",
    IMAGE_PATTERN: "an image reference without spaces",
    BUCKET_PATTERN: "a folder in a bucket such as s3://models/llama-8b",
    ABSOLUTE_PATTERN: "an absolute path, one that begins with '/'",
    MOUNT_PATTERN: "an absolute path such as /mnt/data, without ':', '//' and a '/' at its end",
    QUANTITY_PATTERN: "a quantity such as 500m, 2 or 4Gi",
}
_BOOLEANS = ("true", "false")
_DESCRIBE: dict[str, Callable[[Mapping[str, Any], str], str]] = {
    "missing": lambda _, __: "is required: add it",
    "enum": _choice,
    "literal_error": _choice,
    "string_pattern_mismatch": _pattern,
    "string_type": lambda _, shown: f"must be text, but is {shown}: put it in quotes",
    "int_type": lambda _, shown: f"must be a whole number, but is {shown}",
    "bool_type": lambda _, shown: f"must be true or false, but is {shown}",
    "list_type": lambda _, shown: f"must be a list, but is {shown}: write one entry a line, each after '- '",
    "dict_type": lambda _, shown: f"must be a mapping of fields, but is {shown}",
    "model_type": lambda _, shown: f"must be a mapping of fields, but is {shown}",
    "model_attributes_type": lambda _, shown: f"must be a mapping of fields, but is {shown}",
    "string_too_long": lambda c, _: f"is too long: write at most {c['max_length']} characters",
    "string_too_short": lambda c, shown: f"is too short, {shown}: write at least {c['min_length']} character",
    "too_long": lambda c, _: f"has {c['actual_length']} entries: keep at most {c['max_length']}",
    "too_short": lambda c, _: f"has {c['actual_length']} entries: write at least {c['min_length']}",
    "greater_than_equal": lambda c, shown: f"must be at least {c['ge']}, but is {shown}",
    "less_than_equal": lambda c, shown: f"must be at most {c['le']}, but is {shown}",
}
