"""The cache: the newest state of each object that validation admits, indexed by namespace, name and label."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from outrider_operator.cluster_model import COMPONENT_LABEL, GROUPS_LABEL, SERVICE_LABEL, Object
from outrider_operator.kinds import SERVICE, ResourceKind
from outrider_operator.operator_metrics import telemetry
from outrider_operator.validation.objects import admit, left_out
from outrider_operator.validation.reading import InvalidInput, labels_of, name_of, namespace_of, uid_of

ObjectKey = tuple[str, str]
"""(namespace, name)"""
Listener = Callable[[ResourceKind, Object], None]
"""Called with an object that was added, changed or deleted."""

_DEPARTED_KEPT = 20_000
_LABELS = (SERVICE_LABEL, COMPONENT_LABEL, GROUPS_LABEL)
_Group = tuple[ResourceKind, str, str]
"""(kind, namespace, "label=value")"""


@dataclass(frozen=True, order=True)
class Key:
    """Namespace and name of a SpeculativeService."""

    namespace: str
    name: str

    @staticmethod
    def of(service: Object) -> Key:
        return Key(namespace_of(service), name_of(service))

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ObjectCache:
    """Objects by kind, namespace and name. Listeners are called for changes by others, not for the operator's own.

    States of an object arrive from lists, watches and answers to writes, in any order. Two rules make the order
    irrelevant: a state never replaces a newer one, and a deleted object does not come back in an older state.
    """

    def __init__(self) -> None:
        self._objects: dict[ResourceKind, dict[ObjectKey, Object]] = {}
        self._groups: dict[_Group, dict[str, Object]] = {}
        self._departed: dict[str, float] = {}
        """uid -> newest version that is out of date; infinite for a deleted object."""
        self._listed: dict[tuple[ResourceKind, str | None], int] = {}
        """(kind, namespace) -> version of the newest complete list. An object that it lacks was deleted by then."""
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def get(self, kind: ResourceKind, namespace: str, name: str) -> Object | None:
        return self._objects.get(kind, {}).get((namespace, name))

    def all(self, kind: ResourceKind) -> Iterator[Object]:
        return iter(list(self._objects.get(kind, {}).values()))

    def count(self, kind: ResourceKind) -> int:
        return len(self._objects.get(kind, ()))

    def labelled(self, kind: ResourceKind, namespace: str, label: str, value: str) -> tuple[Object, ...]:
        """Objects with `value` of `label`: of a service, of a component, or of a LeaderWorkerSet."""
        return tuple(self._groups.get((kind, namespace, f"{label}={value}"), {}).values())

    def seen(self, kind: ResourceKind, document: Object) -> None:
        """Store a state of `document` from a list or a watch."""
        before = self.get(kind, namespace_of(document), name_of(document))
        if not self.wrote(kind, document):
            return
        after = self.get(kind, namespace_of(document), name_of(document))
        if before is not None and after is not None and content(kind, before) == content(kind, after):
            return
        if (news := after or before) is not None:
            self._tell(kind, news)

    def completed(self, kind: ResourceKind, document: Object) -> None:
        """Store the whole of `document`, of which watches report only the metadata."""
        known = self.get(kind, namespace_of(document), name_of(document))
        if known is not None and uid_of(known) == uid_of(document) and version_of(known) == version_of(document):
            self._take_in(kind, document)
        else:
            self.seen(kind, document)

    def wrote(self, kind: ResourceKind, document: Object) -> bool:
        """Store the API server's answer to a write, before the watch delivers it. False if it is out of date."""
        if self._is_old(kind, document):
            return False
        self._take_in(kind, document)
        return True

    def wrote_deletion(self, kind: ResourceKind, document: Object) -> None:
        """Remove a document that the operator deleted, without calling listeners."""
        self._end(kind, document, math.inf)

    def left(self, kind: ResourceKind, document: Object) -> None:
        """Remove an object that a watch reports as deleted. It may only have lost the label that the watch selects by,
        so newer states are accepted."""
        self.gone(kind, document, by=version_of(document))

    def gone(self, kind: ResourceKind, document: Object, by: float = math.inf) -> None:
        """Remove a document that others deleted. States up to version `by` are ignored from now on."""
        before = self._end(kind, document, by)
        if before is not None:
            self._tell(kind, before)

    def clear(self) -> None:
        """Remove everything, including versions: in a cluster that was restored from a backup they begin lower."""
        objects = [(kind, document) for kind, documents in self._objects.items() for document in documents.values()]
        for known in (self._objects, self._groups, self._departed, self._listed):
            known.clear()
        for kind, document in objects:
            self._tell(kind, document)

    def listed(self, kind: ResourceKind, namespace: str | None, present: Container[ObjectKey], version: int) -> None:
        """Remove objects that are older than the complete list `present` at `version` and not in it."""
        self._listed[kind, namespace] = max(version, self._listed.get((kind, namespace), 0))
        for key, document in list(self._objects.get(kind, {}).items()):
            if namespace in (None, key[0]) and key not in present and version_of(document) <= version:
                self.gone(kind, document, by=version)

    def _take_in(self, kind: ResourceKind, document: Object) -> None:
        """Store the admitted parts of `document`."""
        before = self._remove(kind, document)
        if before is not None and uid_of(before) != uid_of(document):
            self._depart(before, math.inf)  # an object of the same name replaced it, so it was deleted
        admitted = admit(kind, document)
        if isinstance(admitted, InvalidInput):
            telemetry.count_invalid(admitted)
            self._depart(document, version_of(document))
            return
        if (invalid := left_out(kind, admitted, document)) is not None:
            telemetry.count_invalid(invalid)
        self._put(kind, admitted)

    def _is_old(self, kind: ResourceKind, document: Object) -> bool:
        """Is `document` not newer than the known state? Versions are ordered, also those of a deleted predecessor."""
        namespace = namespace_of(document)
        before = self.get(kind, namespace, name_of(document))
        if before is not None:
            known = version_of(before)
        else:
            known = max(self._listed.get((kind, scope), 0) for scope in (None, namespace))
        return version_of(document) <= max(known, self._departed.get(uid_of(document), 0))

    def _end(self, kind: ResourceKind, document: Object, by: float) -> Object | None:
        """Remove `document` and return it if it was there. A successor of the same name or a newer state stays."""
        self._depart(document, by)
        before = self.get(kind, namespace_of(document), name_of(document))
        if before is None or uid_of(before) != uid_of(document) or version_of(before) > by:
            return None
        return self._remove(kind, document)

    def _depart(self, document: Object, version: float) -> None:
        uid = uid_of(document)
        self._departed[uid] = max(version, self._departed.pop(uid, 0))
        if len(self._departed) > _DEPARTED_KEPT:
            del self._departed[next(iter(self._departed))]

    def _put(self, kind: ResourceKind, document: Object) -> None:
        self._objects.setdefault(kind, {})[namespace_of(document), name_of(document)] = document
        for group in _groups(kind, document):
            self._groups.setdefault(group, {})[name_of(document)] = document

    def _remove(self, kind: ResourceKind, document: Object) -> Object | None:
        before = self._objects.get(kind, {}).pop((namespace_of(document), name_of(document)), None)
        for group in _groups(kind, before) if before is not None else ():
            del self._groups[group][name_of(document)]
            if not self._groups[group]:
                del self._groups[group]
        return before

    def _tell(self, kind: ResourceKind, document: Object) -> None:
        for listener in self._listeners:
            listener(kind, document)


def content(kind: ResourceKind, document: Object) -> Object:
    """`document` without what triggers no reconcile: the version, and a service's status, which Outrider writes."""
    metadata = {name: value for name, value in document["metadata"].items() if name != "resourceVersion"}
    body = {name: value for name, value in document.items() if not (kind == SERVICE and name == "status")}
    return {**body, "metadata": metadata}


def version_of(document: Object) -> int:
    """Resource version as an integer. It grows over all objects of a kind, which Kubernetes 1.35 guarantees."""
    return int(document["metadata"]["resourceVersion"])


def _groups(kind: ResourceKind, document: Object) -> list[_Group]:
    labels, namespace = labels_of(document), namespace_of(document)
    return [(kind, namespace, f"{name}={labels[name]}") for name in _LABELS if name in labels]
