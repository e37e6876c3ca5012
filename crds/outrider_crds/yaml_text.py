"""Read YAML like kubectl and the API server, so that a manifest means the same here.

They use a YAML 1.1 reader (go-yaml v2) and convert to JSON. So `Off` is false, `1e3` is 1000, `1:30` and dates are
text, keys become text, and a repeated key is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from typing import Any

import yaml

_TRUE = ("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON")
_FALSE = ("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF")
_NULL = ("", "~", "null", "Null", "NULL")
_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|[0-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LARGEST_PLAIN = 1e21  # beyond it, Go's JSON keeps the exponent and the number stays a float


class YamlTextError(ValueError):
    """The text is not YAML, or has values that JSON cannot express. The message names line and column."""


def read_documents(text: str) -> list[Any]:
    """The documents of `text` as JSON values. Raises YamlTextError."""
    try:
        documents = [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
        json.dumps(documents)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlTextError(f"{where}{error.problem or error}") from None
    except yaml.YAMLError as error:
        raise YamlTextError(str(error)) from None
    except RecursionError:
        raise YamlTextError("it is nested too deeply to be read; remove brackets or indentation") from None
    except (TypeError, ValueError) as error:  # sets, bytes, an anchor within itself
        raise YamlTextError(f"it holds what JSON cannot: {error}; use plain mappings, lists and text") from None
    return documents


class _Loader(yaml.SafeLoader):
    """PyYAML loader with go-yaml's rules for plain scalars and repeated keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self._refuse_repeated_keys(node)
        return {_key(k): v for k, v in super().construct_mapping(node, deep=deep).items()}

    def _refuse_repeated_keys(self, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
            if key in seen and key != "<<":
                problem = f"the key {key!r} stands twice in one mapping; remove one"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)


def _key(key: object) -> str:
    if isinstance(key, bool):
        return "true" if key else "false"
    return str(key)


def _plain(_loader: _Loader, node: yaml.ScalarNode) -> Any:
    """The value of a scalar: text if it is quoted, else by go-yaml's rules."""
    text: str = node.value
    if node.style is not None:
        return text
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    return _number(text, node)


def _number(text: str, node: yaml.ScalarNode) -> Any:
    if _NOT_FINITE.fullmatch(text):
        problem = f"{text} cannot be written in JSON; use a finite number"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        value = float(text.replace("_", ""))
        return int(value) if value.is_integer() and abs(value) < _LARGEST_PLAIN else value
    return text


def _integer(text: str) -> int | str:
    digits = text.replace("_", "")
    try:
        if re.fullmatch(r"[-+]?0[0-7]+", digits):
            return int(digits, 8)
        return int(digits, 10 if digits.lstrip("+-").isdigit() else 0)
    except ValueError:
        return text


_Loader.add_constructor("tag:yaml.org,2002:str", _plain)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
