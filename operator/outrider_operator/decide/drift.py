"""Does an object still hold what Outrider last applied? An idle operator must not write.

The comparison is "contains": the API server adds defaults and others may add fields; what Outrider set must be
there. A digest of the applied object, kept in an annotation, catches what Outrider has since dropped.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from outrider_crds.base import digest
from outrider_crds.quantity import quantity

from outrider_operator.inbound.reading import annotation, cut, text
from outrider_operator.model import Object

APPLIED_ANNOTATION = "outrider.dev/applied"
# Lists that merge by a key, so that others may add items; all other lists belong to whoever sets them. So do lists of
# these names whose items have no such key: the ports of a NetworkPolicy.
_SHARED_LISTS = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "name",
    "ownerReferences": "uid",
}
_QUANTITIES = frozenset({"limits", "requests", "sizeLimit"})


def stamp(desired: Object) -> Object:
    """`desired` with the digest of itself among its annotations."""
    metadata = desired["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest(desired)}
    return {**desired, "metadata": {**metadata, "annotations": annotations}}


def needs_apply(observed: Object | None, desired: Object) -> bool:
    """True unless `observed` holds everything that the stamped `desired` says, and nothing that it said before."""
    if observed is None:
        return True
    if annotation(observed, APPLIED_ANNOTATION) != annotation(desired, APPLIED_ANNOTATION):
        return True
    return not contains(observed, desired)


def contains(observed: Any, desired: Any, field: str = "") -> bool:
    """True when every value of `desired` stands in `observed`; the API server drops empty ones."""
    if isinstance(desired, dict):
        return isinstance(observed, dict) and all(
            contains(observed[key], value, _field(field, key)) if key in observed else _is_empty(value)
            for key, value in desired.items()
        )
    if isinstance(desired, list):
        return isinstance(observed, list) and _contains_items(observed, desired, field)
    return bool(observed == desired) or (field in _QUANTITIES and quantity(observed) == quantity(desired))


def difference(observed: Any, desired: Any, field: str = "", path: str = "") -> str:
    """Where `observed` parts from `desired`, in words; empty where it contains it."""
    if contains(observed, desired, field):
        return ""
    parts = _parts(observed, desired, field, path)
    deeper = (difference(*part) for part in parts)
    return next((each for each in deeper if each), f"{path} is {_shown(observed)}, not {_shown(desired)}")


def _parts(observed: Any, desired: Any, field: str, path: str) -> list[tuple[Any, Any, str, str]]:
    """What `difference` takes, for each part of two objects or lists; [] where they are not alike."""
    if isinstance(desired, dict) and isinstance(observed, dict):
        told = [key for key, value in desired.items() if key in observed or not _is_empty(value)]
        return [(observed.get(key), desired[key], _field(field, key), f"{path}.{key}".lstrip(".")) for key in told]
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
    """Others' items stay for ever and may be thousands: nobody goes through all of them for each of ours."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        found[text(item, key)].append(item)
    return found


def _is_empty(value: Any) -> bool:
    return value in (None, False, "", 0) or value in ({}, [])
