"""Detect objects that differ from what Outrider last applied. An idle operator must not write.

An object must contain every field that Outrider set; the API server adds defaults, and others may add fields. A digest
of the applied object, in an annotation, detects fields that Outrider no longer sets.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from outrider_crds.base import digest
from outrider_crds.quantity import quantity

from outrider_operator.cluster_model import Object
from outrider_operator.validation.reading import annotation, cut, text

APPLIED_ANNOTATION = "outrider.dev/applied"
# Lists that merge by a key, so that others may add items. All other lists belong to one owner. So do lists of these
# names whose items have no such key, such as the ports of a NetworkPolicy.
_SHARED_LISTS = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "name",
    "ownerReferences": "uid",
}
_QUANTITIES = frozenset({"divisor", "limits", "overhead", "requests", "sizeLimit"})
"""Fields of quantities, or of maps of them. The API server writes back other texts of the same value."""


def stamp(desired: Object) -> Object:
    """`desired` with its own digest as an annotation."""
    metadata = desired["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest(desired)}
    return {**desired, "metadata": {**metadata, "annotations": annotations}}


def needs_apply(observed: Object | None, desired: Object) -> bool:
    """True unless `observed` contains the stamped `desired`, and no field that Outrider set before."""
    if observed is None:
        return True
    if annotation(observed, APPLIED_ANNOTATION) != annotation(desired, APPLIED_ANNOTATION):
        return True
    return not contains(observed, desired)


def contains(observed: Any, desired: Any, field: str = "") -> bool:
    """True if `observed` has every value of `desired`. Empty values may be missing: the API server drops them."""
    if isinstance(desired, dict):
        return isinstance(observed, dict) and all(
            contains(observed[key], value, _field(field, key)) if key in observed else _is_empty(value)
            for key, value in desired.items()
        )
    if isinstance(desired, list):
        return isinstance(observed, list) and _contains_items(observed, desired, field)
    return bool(observed == desired) or (field in _QUANTITIES and quantity(observed) == quantity(desired))


def difference(observed: Any, desired: Any, field: str = "", path: str = "") -> str:
    """A sentence about the first field of `desired` that `observed` does not contain; empty if there is none."""
    if contains(observed, desired, field):
        return ""
    parts = _parts(observed, desired, field, path)
    deeper = (difference(*part) for part in parts)
    return next((sentence for sentence in deeper if sentence), f"{path} is {_shown(observed)}, not {_shown(desired)}")


def _parts(observed: Any, desired: Any, field: str, path: str) -> list[tuple[Any, Any, str, str]]:
    """Arguments of `difference` for each part of two objects or lists; [] if they have no common parts."""
    if isinstance(desired, dict) and isinstance(observed, dict):
        keys = [key for key, value in desired.items() if key in observed or not _is_empty(value)]
        return [(observed.get(key), desired[key], _field(field, key), f"{path}.{key}".lstrip(".")) for key in keys]
    if not (isinstance(desired, list) and isinstance(observed, list)):
        return []
    key = _SHARED_LISTS.get(field, "")
    if key and all(text(want, key) for want in desired):
        there = _by_key(observed, key)
        names = [text(want, key) for want in desired]
        return [(next(iter(there[n]), None), w, "", f"{path}[{n}]") for n, w in zip(names, desired, strict=True)]
    pairs = zip(observed, desired, strict=False) if len(observed) == len(desired) else ()
    return [(have, want, "", f"{path}[{number}]") for number, (have, want) in enumerate(pairs)]


def _shown(value: Any) -> str:
    return "absent" if value is None else cut(json.dumps(value), 200)


def _field(parent: str, key: str) -> str:
    return parent if parent in _QUANTITIES else key


def _contains_items(observed: list[Any], desired: list[Any], field: str) -> bool:
    key = _SHARED_LISTS.get(field, "")
    if key and all(text(want, key) for want in desired):
        there = _by_key(observed, key)
        return all(any(contains(have, want) for have in there[text(want, key)]) for want in desired)
    return len(observed) == len(desired) and all(contains(*pair) for pair in zip(observed, desired, strict=True))


def _by_key(items: list[Any], key: str) -> defaultdict[str, list[Any]]:
    """Index items by key. Others may add thousands of items, too many to search for each of ours."""
    items_by_key: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        items_by_key[text(item, key)].append(item)
    return items_by_key


def _is_empty(value: Any) -> bool:
    return value in (None, False, "", 0) or value in ({}, [])
