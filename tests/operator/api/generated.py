"""Manifests made from the API's own schema: good ones, and ones that a single change may have spoilt.

A good one is put together from parts that hold on their own; what the rules say of parts together is decided by
`load_manifest`, so that half of the examples are not lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import yaml
from hypothesis import strategies as st
from outrider_crds.manifest import ManifestError, load_manifest
from outrider_crds.schema import JsonObject, structural_schema
from outrider_crds.spec import SpeculativeServiceSpec

Draw = Callable[[st.SearchStrategy[Any]], Any]
Place = tuple[Any, Any]

_SPEC = structural_schema(SpeculativeServiceSpec, lambda _: [])
_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
# Texts that mean something in more than one place, so that parts meet; and some that look like others.
_WORDS = (
    "data", "settings", "lookup", "a", "x" * 41, "x" * 64, "A", "a.b", "a_b", "-a", "a-", "a/b", "/a", "/a/b", "/a/",
    "a:b", "/tmp", "/tmp/x", "/etc", "/etc/outrider", "..", "a/../b", ".a", "metadata.name", "metadata.labels['a']",
    "cpu", "1", "4Gi", "4 Gi", "1e3", "500m", "-1", "0", "1.5", "", " ", "true", "Off", "null", "nvidia.com/gpu",
    "kubernetes.io/x", "50ms", "1d", "\n", "é", "😀", "HOME", "OUTRIDER_X", "outrider-tmp",
    "outrider.dev/service", "In", "Exists", "NoExecute",
)  # fmt: skip
_KEYS = ("a", "team", "example.com/x", "cpu", "memory", "a b", "nvidia.com/gpu", "outrider.dev/x")
_FIELDS = ("extra", "name", "value", "a b", "operator", "values", "limits", "nodeAfinity")
_ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([10**15, 10**19, 10**30, -(2**63), 0.5, 1e30]),
    st.sampled_from(_WORDS), _TEXT, st.sampled_from([[], {}, [None], [{}], ["a"], {"a": None}, {"a": "b"}]),
)  # fmt: skip


def _strings(schema: JsonObject) -> st.SearchStrategy[str]:
    longest = schema.get("maxLength", 64)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "pattern" not in schema:
        return st.one_of(st.sampled_from(["a", "model/x", "--flag=1"]), _TEXT).filter(lambda t: len(t) <= longest)
    known = st.sampled_from(_WORDS)
    made = st.from_regex(schema["pattern"], fullmatch=True, alphabet=st.characters(min_codepoint=32, max_codepoint=126))
    return st.one_of(made, known).filter(lambda text: schema.get("minLength", 0) <= len(text) <= longest)


def values(schema: JsonObject) -> st.SearchStrategy[Any]:
    """What the schema, without the rules, lets through; for texts also some that it does not."""
    if schema.get("x-kubernetes-int-or-string"):
        return st.one_of(st.integers(0, 9), st.sampled_from(["1", "500m", "4Gi", "2e9", "1.5G", "0", "3M"]))
    match schema["type"]:
        case "string":
            return _strings(schema)
        case "integer":
            return st.integers(schema.get("minimum", 0), min(schema["maximum"], schema.get("minimum", 0) + 20))
        case "boolean":
            return st.booleans()
        case "array":
            return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=2)
    if "additionalProperties" in schema:
        keys = st.sampled_from(
            ["a", "team", "example.com/x", "cpu", "memory", "a b", "nvidia.com/gpu", "outrider.dev/x"]
        )
        return st.dictionaries(keys, values(schema["additionalProperties"]), max_size=2)
    return st.deferred(lambda: _objects(schema))


@st.composite
def _objects(draw: Draw, schema: JsonObject) -> JsonObject:
    """The required fields, and a few of the others."""
    required = schema.get("required", [])
    others = [name for name in schema["properties"] if name not in required]
    chosen = draw(st.lists(st.sampled_from(others), max_size=3, unique=True)) if others else []
    return {name: draw(values(schema["properties"][name])) for name in (*required, *chosen)}


def document(spec: JsonObject) -> JsonObject:
    return {
        "apiVersion": "outrider.dev/v1alpha1", "kind": "SpeculativeService", "metadata": {"name": "chat"}, "spec": spec,
    }  # fmt: skip


def text(spec: JsonObject) -> str:
    return yaml.safe_dump(document(spec))


def problems(manifest: str) -> list[str]:
    """What `serve -f` says of it."""
    try:
        load_manifest(manifest)
    except ManifestError as error:
        return error.problems
    return []


@st.composite
def good(draw: Draw) -> JsonObject:
    """A spec that `serve -f` takes: parts generated from the schema, as far as they are valid together."""
    spec: JsonObject = {"target": {"name": "org/model"}, "accelerator": {"products": ["cpu"]}}
    names = sorted(_SPEC["properties"].keys() - {"podTemplate"})  # Kubernetes judges it, not admission
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=4)):
        _add(spec, name, draw(values(_SPEC["properties"][name])), spec)
    return spec


def _add(holder: JsonObject, name: str, value: Any, spec: JsonObject) -> None:
    before = copy.deepcopy(holder)
    holder[name] = value
    if problems(text(spec)):
        holder.clear()
        holder.update(before)


@st.composite
def near_good(draw: Draw) -> JsonObject:
    """A good spec with one change, at any depth: a value of another kind, a field too many, a field too few."""
    spec: JsonObject = copy.deepcopy(draw(good()))
    holder, key = draw(st.sampled_from(_places(spec)))
    change = draw(st.sampled_from(["replace", "replace", "remove", "add", "repeat"]))
    if change == "replace":
        holder[key] = copy.deepcopy(draw(_like(holder[key])))
    elif change == "remove":
        del holder[key]
    elif change == "repeat" and isinstance(holder[key], list) and holder[key]:
        holder[key].append(copy.deepcopy(holder[key][0]))
    elif isinstance(holder, dict):
        holder[
            draw(st.sampled_from(["extra", "name", "value", "a b", "operator", "values", "limits", "nodeAfinity"]))
        ] = copy.deepcopy(draw(_ANYTHING))
    return spec


def _like(value: Any) -> st.SearchStrategy[Any]:
    """Most often of the same kind: texts and numbers that are right in another place."""
    if isinstance(value, str):
        return st.one_of(st.sampled_from(_WORDS), st.sampled_from(_WORDS), _ANYTHING)
    if isinstance(value, int):
        return st.one_of(st.booleans() if isinstance(value, bool) else st.integers(0, 20), _ANYTHING)
    return _ANYTHING


def _places(value: Any) -> list[Place]:
    """Every place of `value`, as what holds it and its key or index."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inside for place in [(value, key), *_places(item)]]
