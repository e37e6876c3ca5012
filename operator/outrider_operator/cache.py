"""The operator's view of the cluster: what the watches saw last, trimmed to what decisions read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from outrider_operator.kinds import NODE, POD, SERVICE, Kind, name_of, namespace_of
from outrider_operator.model import Object

ObjectKey = tuple[str, str]
"""(namespace, name)"""
Listener = Callable[[Kind, Object], None]
"""Called with an object that appeared, changed or went."""

_POD_SPEC = ("nodeName", "affinity", "nodeSelector", "tolerations", "priorityClassName", "schedulerName")
_NODE_STATUS = ("capacity", "allocatable")


class Cache:
    """Objects by kind, namespace and name. Listeners hear of changes that others made, not of the operator's own."""

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[ObjectKey, Object]] = {}
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._objects.get(kind, {}).get((namespace, name))

    def all(self, kind: Kind) -> Iterator[Object]:
        return iter(list(self._objects.get(kind, {}).values()))

    def within(self, kind: Kind, namespace: str) -> Iterator[Object]:
        return (document for document in self.all(kind) if namespace_of(document) == namespace)

    def seen(self, kind: Kind, document: Object) -> None:
        """A watch reported `document`; an older state than the cache's is ignored."""
        trimmed = trim(kind, document)
        before = self.get(kind, namespace_of(document), name_of(document))
        if before is not None and not _newer(trimmed, before):
            return
        self._put(kind, trimmed)
        if before is None or content(kind, before) != content(kind, trimmed):
            self._tell(kind, trimmed)

    def wrote(self, kind: Kind, document: Object) -> None:
        """The operator wrote `document`, as the API server returned it: the watch brings it only later."""
        trimmed = trim(kind, document)
        before = self.get(kind, namespace_of(document), name_of(document))
        if before is None or _newer(trimmed, before):
            self._put(kind, trimmed)

    def wrote_deletion(self, kind: Kind, document: Object) -> None:
        """The operator deleted `document`, so the watch's word of it is no news."""
        self._remove(kind, document)

    def gone(self, kind: Kind, document: Object) -> None:
        before = self._remove(kind, document)
        if before is not None:
            self._tell(kind, before)

    def relisted(self, kind: Kind, namespace: str | None, documents: Iterable[Object]) -> None:
        """`documents` is all there is (in `namespace`): add, change and drop accordingly."""
        present = set()
        for document in documents:
            present.add((namespace_of(document), name_of(document)))
            self.seen(kind, document)
        for document in list(self.all(kind)):
            key = (namespace_of(document), name_of(document))
            if key not in present and namespace in (None, key[0]):
                self.gone(kind, document)

    def _remove(self, kind: Kind, document: Object) -> Object | None:
        before = self.get(kind, namespace_of(document), name_of(document))
        if before is None or before["metadata"]["uid"] != document["metadata"]["uid"]:
            return None
        return self._objects[kind].pop((namespace_of(document), name_of(document)))

    def _put(self, kind: Kind, document: Object) -> None:
        self._objects.setdefault(kind, {})[namespace_of(document), name_of(document)] = document

    def _tell(self, kind: Kind, document: Object) -> None:
        for listener in self._listeners:
            listener(kind, document)


def trim(kind: Kind, document: Object) -> Object:
    """`document` without what no decision reads: it bounds the memory that large clusters take."""
    metadata = {name: value for name, value in document["metadata"].items() if name != "managedFields"}
    trimmed = {**document, "metadata": metadata, "apiVersion": kind.api_version, "kind": kind.kind}
    if kind == POD:
        trimmed["spec"] = _trim_pod_spec(document.get("spec", {}))
    if kind == NODE:
        return _trim_node(trimmed)
    return trimmed


def content(kind: Kind, document: Object) -> Object:
    """`document` without what must wake nobody: the version, and a service's status, which Outrider itself writes."""
    metadata = {name: value for name, value in document["metadata"].items() if name != "resourceVersion"}
    body = {name: value for name, value in document.items() if not (kind == SERVICE and name == "status")}
    return {**body, "metadata": metadata}


def _trim_pod_spec(spec: Object) -> Object:
    containers = [
        {name: container[name] for name in ("name", "image", "resources") if name in container}
        for container in spec.get("containers", [])
    ]
    return {**{name: spec[name] for name in _POD_SPEC if name in spec}, "containers": containers}


def _trim_node(node: Object) -> Object:
    metadata = node["metadata"]
    status = node.get("status", {})
    ready = [
        {"type": "Ready", "status": condition["status"]}
        for condition in status.get("conditions", [])
        if condition["type"] == "Ready"
    ]
    spec = {name: node["spec"][name] for name in ("unschedulable", "taints") if name in node.get("spec", {})}
    return {
        "apiVersion": node["apiVersion"],
        "kind": node["kind"],
        "metadata": {name: metadata[name] for name in ("name", "uid", "labels", "resourceVersion") if name in metadata},
        "spec": spec,
        "status": {**{name: status[name] for name in _NODE_STATUS if name in status}, "conditions": ready},
    }


def _newer(document: Object, than: Object) -> bool:
    """Resource versions of one object are ordered integers (Kubernetes 1.35 says so; etcd always made them so)."""
    if document["metadata"]["uid"] != than["metadata"]["uid"]:
        return True
    return int(document["metadata"]["resourceVersion"]) > int(than["metadata"]["resourceVersion"])
