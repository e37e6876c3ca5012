"""Validate Kubernetes objects: which of them enter the cache, and which of their fields.

Anyone may put Outrider's labels on an object. An object enters the cache only if it has an owner of the expected kind
and is not too large. Only fields that decisions read are kept. A rejected object is read by its name if a service needs
it. The number of objects is bounded by the ResourceQuotas of their namespaces.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from outrider_crds.spec import API_GROUP, KIND
from pydantic_core import to_json

from outrider_operator import cluster_model, kinds
from outrider_operator.cluster_model import Object
from outrider_operator.validation import reading
from outrider_operator.validation.managed_fields import newest_writer

MOST_DATA = 256 * 1024
"""Bytes of memory for a ConfigMap's data. Outrider's own take some KiB, a profile with all failures 200 KiB."""
MOST_OBJECT = 16 * 1024
"""Bytes of JSON in an object without ConfigMap data. Outrider's own take some KiB, a profile with all owners 12 KiB."""
MOST_VALUES = 500
"""Values in an object: an empty value takes three bytes of JSON, but thirty times as much memory."""
LARGE = {kinds.DEPLOYMENT: 4, kinds.POD: 4}
"""Kind -> factor of both limits, for a pod template or the statuses of many containers."""
MOST_SPEC = 64 * 1024
"""Bytes of JSON in the spec of a service. The CRD limits each list and text, but not their sum."""
MOST_PODLESS = 8 * 1024
"""Bytes that are kept of a larger spec. Eight SLO classes and all other small fields take 2 KB."""
MOST_ANNOTATIONS = 16 * 1024
"""Bytes of memory for an object's annotations."""
MOST_LABELS = 2 * 1024
"""Bytes of memory for labels that are not Outrider's, by which NetworkPolicies select pods."""
_SOURCE = "object"
_OURS = ((API_GROUP, KIND),)
_OWNERS: Mapping[kinds.ResourceKind, tuple[tuple[str, str], ...]] = {
    kinds.REPLICA_SET: (("apps", "Deployment"),),
    kinds.POD: (("apps", "ReplicaSet"), ("apps", "StatefulSet"), ("batch", "Job")),
    kinds.STATEFUL_SET: (("leaderworkerset.x-k8s.io", "LeaderWorkerSet"), ("v1", "Pod")),
}
"""Kind -> (group, kind) of the owner of Outrider's objects of that kind. The default is the service itself."""
_ADOPTED = frozenset({kinds.REPLICA_SET, kinds.JOB})
"""Kinds that may have no owner for a moment: a Deployment adopts ReplicaSets, a service adopts or deletes Jobs. A
profile may have none, too, until a service needs it."""
_NAMED = frozenset({kinds.DEPLOYMENT, kinds.KUBERNETES_SERVICE, kinds.SERVICE_ACCOUNT, kinds.DISRUPTION_BUDGET})
"""Kinds whose objects have the name of their service or its canary, which limits their number."""
ANNOTATIONS = frozenset(
    f"{API_GROUP}/{name}"
    for name in (
        "abort", "applied", "asked", "attempt", "boot-draft-tokens", "contents", "held", "hot", "inputs", "model",
        "nodes", "prefetch", "product", "promote", "ready-revision", "reprofile", "retry", "rollout", "runtime-image",
        "runtime-upgrade", "scaled-down-while-held", "settings",
    )
)  # fmt: skip
"""Annotations that decisions read."""
LABELS = frozenset(
    {
        cluster_model.MANAGED_BY_LABEL,
        cluster_model.SERVICE_LABEL,
        cluster_model.REVISION_LABEL,
        cluster_model.TRACK_LABEL,
        cluster_model.COMPONENT_LABEL,
        cluster_model.GROUPS_LABEL,
        cluster_model.JOB_NAME_LABEL,
        f"{API_GROUP}/inputs",
    }
    | {"app.kubernetes.io/name", "app.kubernetes.io/instance", "batch.kubernetes.io/controller-uid"}
)
"""Labels that decisions read."""
_POD_SPEC = ("nodeName", "schedulingGates", "tolerations")
_POD_STATUS = (
    "phase", "reason", "message", "podIP", "conditions", "initContainerStatuses", "containerStatuses",
)  # fmt: skip
_SERVICE_METADATA = (
    "name", "namespace", "uid", "generation", "resourceVersion", "creationTimestamp", "deletionTimestamp",
    "annotations",
)  # fmt: skip
_NODE_METADATA = ("name", "uid", "labels", "resourceVersion")
_WITHOUT_TEMPLATE = frozenset({kinds.REPLICA_SET, kinds.STATEFUL_SET, kinds.JOB})
"""Kinds whose pod template is dropped: decisions read only other fields of their spec."""


def admit(kind: kinds.ResourceKind, document: Object) -> Object | reading.InvalidInput:
    """`document` trimmed for the cache; InvalidInput if it is not one of Outrider's objects, or too large."""
    if kind == kinds.SERVICE:
        writer = _replica_writer(document)
        return {**_service(trimmed(kind, document)), **({cluster_model.REPLICA_WRITER: writer} if writer else {})}
    if kind == kinds.NODE:
        return trimmed(kind, document)
    if not _has_our_owner(kind, document):
        return reading.InvalidInput(_SOURCE, "NoOwner", f"{_where(kind, document)} carries no owner of Outrider's")
    if kind in _NAMED and reading.name_of(document) not in _names(
        kind, reading.label(document, cluster_model.SERVICE_LABEL)
    ):
        return reading.InvalidInput(_SOURCE, "NoService", f"{_where(kind, document)} does not have its service's name")
    return bounded(kind, document)


def bounded(kind: kinds.ResourceKind, document: Object) -> Object | reading.InvalidInput:
    """The fields of `document` that decisions read; InvalidInput if they are too large."""
    kept = trimmed(kind, document)
    weighed = {name: value for name, value in kept.items() if name != "data"}
    size, values, times = len(to_json(weighed)), sum(1 for _ in _values(weighed)), LARGE.get(kind, 1)
    if size > times * MOST_OBJECT or values > times * MOST_VALUES:
        return reading.InvalidInput(_SOURCE, "TooLarge", f"{_where(kind, document)}: {size} bytes, {values} values")
    return kept


def trimmed(kind: kinds.ResourceKind, document: Object) -> Object:
    """The fields of `document` that decisions read. A ConfigMap that was read completely always has `data`."""
    kept = {**document, "metadata": _metadata(kind, document), "apiVersion": kind.api_version, "kind": kind.kind}
    if kind == kinds.POD:
        return {
            **kept,
            "spec": _only(document.get("spec"), _POD_SPEC),
            "status": _only(document.get("status"), _POD_STATUS),
        }
    if kind == kinds.NODE:
        return _node(kept)
    if kind == kinds.CONFIG_MAP:
        own = _only(kept, ("apiVersion", "kind", "metadata", "immutable"))
        return own if is_partial(document) else {**own, "data": _smallest(document.get("data") or {}, MOST_DATA)}
    if kind in _WITHOUT_TEMPLATE:
        spec = document.get("spec") or {}
        return {**kept, "spec": {name: value for name, value in spec.items() if name != "template"}}
    return kept


def left_out(kind: kinds.ResourceKind, admitted: Object, document: Object) -> reading.InvalidInput | None:
    """InvalidInput about values of a ConfigMap that were too large; None if all were kept."""
    lost = len(document.get("data") or ()) - len(admitted.get("data") or ()) if kind == kinds.CONFIG_MAP else 0
    problem = f"{_where(kind, document)}: {lost} values beyond {MOST_DATA} bytes"
    return reading.InvalidInput(_SOURCE, "TooLarge", problem) if lost else None


def is_partial(document: Object) -> bool:
    """True if `document` has only the metadata of an object."""
    return document.get("kind") == "PartialObjectMetadata"


def _names(kind: kinds.ResourceKind, service: str) -> tuple[str, ...]:
    """Names that objects of `kind` with the label of `service` may have."""
    return (service, cluster_model.canary_name(service)) if kind == kinds.DEPLOYMENT else (service,)


def _where(kind: kinds.ResourceKind, document: Object) -> str:
    metadata = document["metadata"]
    return f"{kind.kind} {metadata.get('namespace')}/{metadata['name']}"


def _has_our_owner(kind: kinds.ResourceKind, document: Object) -> bool:
    owners = [(str(ref.get("apiVersion", "")).partition("/")[0], ref.get("kind")) for ref in _owners(kind, document)]
    if not owners:
        return (
            kind in _ADOPTED
            or reading.component(document) in (cluster_model.PROFILE, cluster_model.SHARED_PROFILE)
            or _keeps_revision(kind, document)
        )
    return any(owner in _OWNERS.get(kind, _OURS) for owner in owners)


def _owners(kind: kinds.ResourceKind, document: Object) -> list[Object]:
    """Owners of `document`. For objects that Kubernetes' controllers create, only the controller counts."""
    controller = reading.controller_of(document)
    return reading.owners_of(document) if kind not in _OWNERS else [controller] if controller else []


def _keeps_revision(kind: kinds.ResourceKind, document: Object) -> bool:
    """Is `document` the ConfigMap of a revision? It may have no owner after `kubectl delete --cascade=orphan`."""
    service, revision = (
        reading.label(document, cluster_model.SERVICE_LABEL),
        reading.label(document, cluster_model.REVISION_LABEL),
    )
    return (
        kind == kinds.CONFIG_MAP
        and bool(revision)
        and reading.name_of(document) == cluster_model.revision_map_name(service, revision)
    )


def _metadata(kind: kinds.ResourceKind, document: Object) -> Object:
    metadata = {name: value for name, value in document["metadata"].items() if name != "managedFields"}
    annotations = metadata.pop("annotations", None) or {}
    kept = _smallest({name: text for name, text in annotations.items() if name in ANNOTATIONS}, MOST_ANNOTATIONS)
    metadata |= {"annotations": kept} if kept else {}
    if kind == kinds.NODE:
        return metadata
    owners = {"ownerReferences": _owners(kind, document)} if "ownerReferences" in metadata else {}
    return metadata | owners | {"labels": _labels(document)}


def _labels(document: Object) -> Mapping[str, str]:
    all_labels = reading.labels_of(document)
    others = {name: value for name, value in all_labels.items() if name not in LABELS}
    return {name: all_labels[name] for name in all_labels if name in LABELS} | dict(_smallest(others, MOST_LABELS))


def _smallest(texts: Mapping[str, str], most: int) -> Mapping[str, str]:
    """The smallest values that fit into `most` bytes. Outrider's own values are small."""
    sizes = itertools.accumulate(sorted(sys.getsizeof(text) for text in texts.values()))
    fitting = sum(size <= most for size in sizes)
    return (
        dict(sorted(texts.items(), key=lambda item: sys.getsizeof(item[1]))[:fitting])
        if fitting < len(texts)
        else texts
    )


def _service(document: Object) -> Object:
    """The service. A spec that is too large is replaced by its size, for a condition message, and by its small fields,
    such as scale and kill switch."""
    kept = {**document, "metadata": _only(document["metadata"], _SERVICE_METADATA)}
    size = len(to_json(document.get("spec") or {}))
    if size <= MOST_SPEC:
        return kept
    small = _only(document["spec"], cluster_model.PODLESS_FIELDS)
    return {**kept, "spec": {cluster_model.TOO_LARGE: size, **(small if len(to_json(small)) <= MOST_PODLESS else {})}}


def _replica_writer(service: Object) -> str:
    entries = service["metadata"].get("managedFields")
    return newest_writer([entry for entry in entries if isinstance(entry, dict)], "spec", "replicas") if entries else ""


def _node(node: Object) -> Object:
    """The fields of a node that decisions read. Other changes, such as heartbeats, would wake every service."""
    return {
        "apiVersion": node["apiVersion"],
        "kind": node["kind"],
        "metadata": _only(node["metadata"], _NODE_METADATA),
        "spec": _only(node.get("spec"), ("taints",)),
        "status": _only(node.get("status"), ("allocatable",)),
    }


def _values(value: Any) -> Iterator[None]:
    """One item for each value within `value`, including itself."""
    yield None
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _values(inner)


def _only(document: Object | None, names: Iterable[str]) -> Object:
    document = document or {}
    return {name: document[name] for name in names if name in document}
