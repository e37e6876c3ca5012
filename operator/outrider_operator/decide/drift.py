"""Does an object still hold what Outrider last applied? An idle operator must not write.

The comparison is "contains": the API server adds defaults and others may add fields; what Outrider set must be
there. A digest of the applied object, kept in an annotation, catches what Outrider has since dropped.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from outrider_crds.base import digest
from outrider_crds.quantity import quantity

from outrider_operator.inbound.reading import annotation, text
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
