"""Derive the structural schema for a CustomResourceDefinition from a pydantic model.

Structural means: no references, no titles, `additionalProperties` only for maps, and no `anyOf` with null. Absent and
null are equal to the API server unless a field is nullable, and none is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider_crds.base import Model

JsonObject = dict[str, Any]
RulesOf = Callable[[str], list[dict[str, str]]]
_DROPPED = frozenset({"title", "const", "$defs", "additionalProperties"})


def structural_schema(model: type[Model], rules_of: RulesOf) -> JsonObject:
    """OpenAPI v3 schema of `model`. rules_of: class name of a model -> its CEL validations."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    definitions = {**document.get("$defs", {}), model.__name__: document}
    return _Translation(definitions, rules_of).node({"$ref": f"#/$defs/{model.__name__}"})


@dataclass(frozen=True)
class _Translation:
    definitions: JsonObject
    rules_of: RulesOf

    def node(self, source: JsonObject) -> JsonObject:
        source = _without_null(source)
        if "$ref" in source:
            source = self._resolved(source)
        result = {k: v for k, v in source.items() if k not in _DROPPED}
        if "const" in source:
            result["enum"] = [source["const"]]
        if source.get("type") == "integer":
            result.setdefault("format", "int64")
        if "description" in source:
            result["description"] = " ".join(source["description"].split())
        return _with_default(result | self._children(source))

    def _resolved(self, source: JsonObject) -> JsonObject:
        """The definition that `source` refers to. The field's own description and default override it."""
        name = source["$ref"].rsplit("/", 1)[1]
        siblings = {k: v for k, v in source.items() if k != "$ref"}
        rules = self.rules_of(name)
        return {**self.definitions[name], **siblings, **({"x-kubernetes-validations": rules} if rules else {})}

    def _children(self, source: JsonObject) -> JsonObject:
        children: JsonObject = {}
        if "properties" in source:
            children["properties"] = {name: self.node(value) for name, value in source["properties"].items()}
        if "items" in source:
            children["items"] = self.node(source["items"])
        if isinstance(source.get("additionalProperties"), dict):
            children["additionalProperties"] = self.node(source["additionalProperties"])
        return children


def _without_null(source: JsonObject) -> JsonObject:
    """Replace `anyOf: [X, null]` with default null by X, which is optional."""
    if "anyOf" not in source:
        return source
    (only,) = [branch for branch in source["anyOf"] if branch != {"type": "null"}]
    siblings = {k: v for k, v in source.items() if k != "anyOf" and not (k == "default" and v is None)}
    return {**only, **siblings}


def _with_default(node: JsonObject) -> JsonObject:
    """Drop empty defaults, and write defaults of objects completely, since CEL rules see them as they are."""
    default = node.get("default")
    if _absent(default, node):
        node.pop("default", None)
    elif isinstance(default, dict):
        node["default"] = _drop_empty_defaults(default, node["properties"])
    return node


def _drop_empty_defaults(default: JsonObject, properties: JsonObject) -> JsonObject:
    return {
        name: _drop_empty_defaults(value, properties[name]["properties"]) if isinstance(value, dict) else value
        for name, value in default.items()
        if not _absent(value, properties[name])
    }


def _absent(value: object, schema: JsonObject) -> bool:
    return value in (None, [], "") or (value == {} and "properties" not in schema)
