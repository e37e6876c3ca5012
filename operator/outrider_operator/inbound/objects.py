"""Kubernetes objects: whose they are, and what of them is kept.

Anyone may put Outrider's labels on an object. One is kept only if it carries an owner of the kind that Outrider's own
have, and of it only what decisions read, where that is not too large and there are not too many: the cache stays small
whatever tenants create. What is left out is read by its name where a service needs it.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from outrider_crds.spec import API_GROUP, KIND
from pydantic_core import to_json

from outrider_operator.inbound.reading import component, controller_of, label, labels_of, name_of, owners_of
from outrider_operator.inbound.unfit import Unfit
from outrider_operator.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    JOB,
    KUBERNETES_SERVICE,
    NODE,
    POD,
    REPLICA_SET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)
from outrider_operator.model import (
    COMPONENT_LABEL,
    JOB_NAME_LABEL,
    MANAGED_BY_LABEL,
    PODLESS_FIELDS,
    PROFILE,
    REVISION_LABEL,
    SERVICE_LABEL,
    SHARED_PROFILE,
    TOO_LARGE,
    TRACK_LABEL,
    Object,
    canary_name,
    revision_map_name,
)

MOST_DATA = 256 * 1024
"""Bytes of memory that a ConfigMap's data takes. Outrider's own hold some KiB; a profile with every failure that is
kept, 200 KiB."""
MOST_OBJECT = 16 * 1024
"""Bytes of JSON in an object, the contents of a ConfigMap aside. Outrider's own take some KiB; a profile with as many
owners as it may have, 12."""
MOST_VALUES = 500
"""Values in it: an empty one takes three bytes of JSON, and thirty times as much in memory."""
LARGE = {DEPLOYMENT: 4, POD: 4}
"""How many times as much of either these may have: a pod template, the statuses of many containers."""
MOST_SPEC = 64 * 1024
"""Bytes of JSON in the spec of a service. The CRD bounds each list and text of it, not their sum."""
MOST_PODLESS = 8 * 1024
"""Bytes that are kept of a larger one: eight SLO classes and all the rest take two thousand."""
MOST_ANNOTATIONS = 16 * 1024
"""The same of an object's annotations."""
MOST_LABELS = 2 * 1024
"""Bytes of memory that the values of others' labels take: NetworkPolicies select pods by them."""
MOST_PODS = 10_000
"""Of a namespace."""
MOST_AT_LEAST, MOST_A_SERVICE = 100, 20
"""Objects of another kind in a namespace, and how many more for each of its services. A service has a handful of each:
ConfigMaps of some revisions and of its profiles, as many Jobs, a few old ReplicaSets."""
_SOURCE = "object"
_OURS = ((API_GROUP, KIND),)
_OWNERS: Mapping[Kind, tuple[tuple[str, str], ...]] = {
    REPLICA_SET: (("apps", "Deployment"),),
    POD: (("apps", "ReplicaSet"), ("batch", "Job")),
}
"""Kind -> (group, kind) of what owns Outrider's objects of that kind; the service itself where it is not named."""
_ADOPTED = frozenset({REPLICA_SET, JOB})
"""May be without any owner for a moment: a Deployment adopts ReplicaSets, a service takes or deletes left Jobs.
So may a profile, which the next service that needs it takes."""
_NAMED = frozenset({DEPLOYMENT, KUBERNETES_SERVICE, SERVICE_ACCOUNT, DISRUPTION_BUDGET})
"""Kinds whose objects have their service's name, or its canary's: there are no more of them than services."""
ANNOTATIONS = frozenset(
    f"{API_GROUP}/{name}"
    for name in (
        "abort", "applied", "asked", "attempt", "boot-draft-tokens", "contents", "hot", "inputs", "model", "nodes",
        "product", "promote", "ready-revision", "reprofile", "retry", "rollout", "runtime-image", "runtime-upgrade",
        "settings",
    )
)  # fmt: skip
"""Those that decisions read."""
LABELS = frozenset(
    {
        MANAGED_BY_LABEL,
        SERVICE_LABEL,
        REVISION_LABEL,
        TRACK_LABEL,
        COMPONENT_LABEL,
        JOB_NAME_LABEL,
        f"{API_GROUP}/inputs",
    }
    | {"app.kubernetes.io/name", "app.kubernetes.io/instance", "batch.kubernetes.io/controller-uid"}
)
"""The same of labels."""
_POD_SPEC = ("nodeName", "tolerations")
_POD_STATUS = ("phase", "reason", "message", "podIP", "conditions", "containerStatuses")
_SERVICE_METADATA = (
    "name", "namespace", "uid", "generation", "resourceVersion", "creationTimestamp", "deletionTimestamp",
    "annotations",
)  # fmt: skip
_NODE_METADATA = ("name", "uid", "labels", "resourceVersion")
_WITHOUT_TEMPLATE = frozenset({REPLICA_SET, JOB})
"""Kinds of whose spec nothing but the numbers is read: the pod template in them is not kept."""


def admit(kind: Kind, document: Object) -> Object | Unfit:
    """`document` as the cache keeps it; Unfit when it is not one of Outrider's, or too large to be."""
    if kind == SERVICE:
        return _service(trimmed(kind, document))
    if kind == NODE:
        return trimmed(kind, document)
    if not _has_our_owner(kind, document):
        return Unfit(_SOURCE, "NoOwner", f"{_where(kind, document)} carries no owner of Outrider's")
    if kind in _NAMED and name_of(document) not in _names(kind, label(document, SERVICE_LABEL)):
        return Unfit(_SOURCE, "NoService", f"{_where(kind, document)} does not have its service's name")
    return bounded(kind, document)


def bounded(kind: Kind, document: Object) -> Object | Unfit:
    """What decisions read of `document`, whoever made it; Unfit when it is too large to be kept."""
    kept = trimmed(kind, document)
    weighed = {name: value for name, value in kept.items() if name != "data"}
    size, values, times = len(to_json(weighed)), sum(1 for _ in _values(weighed)), LARGE.get(kind, 1)
    if size > times * MOST_OBJECT or values > times * MOST_VALUES:
        return Unfit(_SOURCE, "TooLarge", f"{_where(kind, document)}: {size} bytes, {values} values")
    return kept


def most_of(kind: Kind, services: int) -> float:
    """How many objects of `kind` are kept of a namespace with so many `services`."""
    if kind in (SERVICE, NODE):
        return math.inf
    return MOST_PODS if kind == POD else MOST_AT_LEAST + MOST_A_SERVICE * services


def too_many(kind: Kind, document: Object) -> Unfit:
    return Unfit(_SOURCE, "TooMany", f"{_where(kind, document)}: its namespace has more than enough of the kind")


def trimmed(kind: Kind, document: Object) -> Object:
    """What decisions read of `document`; of a ConfigMap that was shown as a whole that includes `data`, if empty."""
    kept = {**document, "metadata": _metadata(kind, document), "apiVersion": kind.api_version, "kind": kind.kind}
    if kind == POD:
        return {
            **kept,
            "spec": _only(document.get("spec"), _POD_SPEC),
            "status": _only(document.get("status"), _POD_STATUS),
        }
    if kind == NODE:
        return _node(kept)
    if kind == CONFIG_MAP:
        own = _only(kept, ("apiVersion", "kind", "metadata", "immutable"))
        return own if is_partial(document) else {**own, "data": _smallest(document.get("data") or {}, MOST_DATA)}
    if kind in _WITHOUT_TEMPLATE:
        spec = document.get("spec") or {}
        return {**kept, "spec": {name: value for name, value in spec.items() if name != "template"}}
    return kept


def left_out(kind: Kind, admitted: Object, document: Object) -> Unfit | None:
    """What of a ConfigMap's data was too large to be kept."""
    lost = len(document.get("data") or ()) - len(admitted.get("data") or ()) if kind == CONFIG_MAP else 0
    problem = f"{_where(kind, document)}: {lost} values beyond {MOST_DATA} bytes"
    return Unfit(_SOURCE, "TooLarge", problem) if lost else None


def is_partial(document: Object) -> bool:
    """True of the metadata of an object alone."""
    return document.get("kind") == "PartialObjectMetadata"


def _names(kind: Kind, service: str) -> tuple[str, ...]:
    """Names that objects of `kind` may have."""
    return (service, canary_name(service)) if kind == DEPLOYMENT else (service,)


def _where(kind: Kind, document: Object) -> str:
    metadata = document["metadata"]
    return f"{kind.kind} {metadata.get('namespace')}/{metadata['name']}"


def _has_our_owner(kind: Kind, document: Object) -> bool:
    owners = [(str(ref.get("apiVersion", "")).partition("/")[0], ref.get("kind")) for ref in _owners(kind, document)]
    if not owners:
        return kind in _ADOPTED or component(document) in (PROFILE, SHARED_PROFILE) or _keeps_revision(kind, document)
    return any(owner in _OWNERS.get(kind, _OURS) for owner in owners)


def _owners(kind: Kind, document: Object) -> list[Object]:
    """Of what Kubernetes' own controllers make, the one that made it: further owners mean nothing to Outrider."""
    controller = controller_of(document)
    return owners_of(document) if kind not in _OWNERS else [controller] if controller else []


def _keeps_revision(kind: Kind, document: Object) -> bool:
    """A revision's ConfigMap. One that a service left to its successor (--cascade=orphan) nobody would look for."""
    service, revision = label(document, SERVICE_LABEL), label(document, REVISION_LABEL)
    return kind == CONFIG_MAP and bool(revision) and name_of(document) == revision_map_name(service, revision)


def _metadata(kind: Kind, document: Object) -> Object:
    metadata = {name: value for name, value in document["metadata"].items() if name != "managedFields"}
    annotations = metadata.pop("annotations", None) or {}
    kept = _smallest({name: text for name, text in annotations.items() if name in ANNOTATIONS}, MOST_ANNOTATIONS)
    metadata |= {"annotations": kept} if kept else {}
    if kind == NODE:
        return metadata
    owners = {"ownerReferences": _owners(kind, document)} if "ownerReferences" in metadata else {}
    return metadata | owners | {"labels": _labels(document)}


def _labels(document: Object) -> Mapping[str, str]:
    given = labels_of(document)
    others = {name: value for name, value in given.items() if name not in LABELS}
    return {name: given[name] for name in given if name in LABELS} | dict(_smallest(others, MOST_LABELS))


def _smallest(texts: Mapping[str, str], most: int) -> Mapping[str, str]:
    """Whole values only, the smallest first: what Outrider wrote outlasts what somebody added."""
    sizes = itertools.accumulate(sorted(sys.getsizeof(text) for text in texts.values()))
    fitting = sum(size <= most for size in sizes)
    return (
        dict(sorted(texts.items(), key=lambda item: sys.getsizeof(item[1]))[:fitting])
        if fitting < len(texts)
        else texts
    )


def _service(document: Object) -> Object:
    """Of one that is too large the size, which its condition tells: its author is to hear of it. Its scale and kill
    switch are kept, where they are small."""
    kept = {**document, "metadata": _only(document["metadata"], _SERVICE_METADATA)}
    size = len(to_json(document.get("spec") or {}))
    if size <= MOST_SPEC:
        return kept
    small = _only(document["spec"], PODLESS_FIELDS)
    return {**kept, "spec": {TOO_LARGE: size, **(small if len(to_json(small)) <= MOST_PODLESS else {})}}


def _node(node: Object) -> Object:
    """Every service hears of a changed node: of a heartbeat, or of one that is not ready for a moment, none does."""
    return {
        "apiVersion": node["apiVersion"],
        "kind": node["kind"],
        "metadata": _only(node["metadata"], _NODE_METADATA),
        "spec": _only(node.get("spec"), ("taints",)),
        "status": _only(node.get("status"), ("allocatable",)),
    }


def _values(value: Any) -> Iterator[None]:
    """One for each value in `value`, itself included."""
    yield None
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _values(inner)


def _only(document: Object | None, names: Iterable[str]) -> Object:
    document = document or {}
    return {name: document[name] for name in names if name in document}
