"""The operator's view of the cluster: the newest state of each object that the boundary admits, by the keys it is
looked up by."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator

from outrider_operator import telemetry
from outrider_operator.inbound.objects import admit, left_out, most_of, too_many
from outrider_operator.inbound.reading import labels_of, name_of, namespace_of, uid_of
from outrider_operator.inbound.unfit import Unfit
from outrider_operator.kinds import SERVICE, Kind
from outrider_operator.model import COMPONENT_LABEL, SERVICE_LABEL, Object

ObjectKey = tuple[str, str]
"""(namespace, name)"""
Listener = Callable[[Kind, Object], None]
"""Called with an object that appeared, changed or went."""

_DEPARTED_KEPT = 20_000
_LABELS = (SERVICE_LABEL, COMPONENT_LABEL)
_Group = tuple[Kind, str, str]
"""(kind, namespace, "label=value"), and all of a namespace under ""."""


class Cache:
    """Objects by kind, namespace and name. Listeners hear of changes that others made, not of the operator's own.

    News of one object comes by several ways (lists, watches, answers to writes) and in any order. Two rules make the
    order irrelevant: a state never replaces a newer one, and what departed does not come back in an older state.
    """

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[ObjectKey, Object]] = {}
        self._groups: dict[_Group, dict[str, Object]] = {}
        self._departed: dict[str, float] = {}
        """uid -> newest version that is known to be past: infinite for an object that is known to be deleted."""
        self._listed: dict[tuple[Kind, str | None], int] = {}
        """(kind, namespace) -> version of the newest whole list: what was not in it had departed by then."""
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._objects.get(kind, {}).get((namespace, name))

    def all(self, kind: Kind) -> Iterator[Object]:
        return iter(list(self._objects.get(kind, {}).values()))

    def count(self, kind: Kind) -> int:
        return len(self._objects.get(kind, ()))

    def within(self, kind: Kind, namespace: str) -> tuple[Object, ...]:
        return tuple(self._groups.get((kind, namespace, ""), {}).values())

    def labelled(self, kind: Kind, namespace: str, label: str, value: str) -> tuple[Object, ...]:
        """Objects with that value of the service's or the component's label."""
        return tuple(self._groups.get((kind, namespace, f"{label}={value}"), {}).values())

    def seen(self, kind: Kind, document: Object) -> None:
        """A list or a watch reported `document`."""
        before = self.get(kind, namespace_of(document), name_of(document))
        if not self._keep(kind, document):
            return
        after = self.get(kind, namespace_of(document), name_of(document))
        if before is not None and after is not None and content(kind, before) == content(kind, after):
            return
        if (news := after or before) is not None:
            self._tell(kind, news)

    def completed(self, kind: Kind, document: Object) -> None:
        """The API server was asked for all of `document`, of which watches report the metadata only."""
        known = self.get(kind, namespace_of(document), name_of(document))
        if known is not None and uid_of(known) == uid_of(document) and version_of(known) == version_of(document):
            self._take_in(kind, document)
        else:
            self.seen(kind, document)

    def wrote(self, kind: Kind, document: Object) -> None:
        """The operator wrote `document`, as the API server returned it: the watch brings it only later."""
        self._keep(kind, document)

    def wrote_deletion(self, kind: Kind, document: Object) -> None:
        """The operator deleted `document`, so the watch's word of it is no news."""
        self._end(kind, document, math.inf)

    def left(self, kind: Kind, document: Object) -> None:
        """A watch reports it as deleted: it is, or it lost the label that the watch selects by, and may get it back."""
        self.gone(kind, document, by=version_of(document))

    def gone(self, kind: Kind, document: Object, by: float = math.inf) -> None:
        """Others deleted `document`; no state of it up to the version `by` is news any more."""
        before = self._end(kind, document, by)
        if before is not None:
            self._tell(kind, before)

    def clear(self) -> None:
        """Forget everything, versions included: after a restored backup they begin again further back."""
        objects = [(kind, document) for kind, documents in self._objects.items() for document in documents.values()]
        for known in (self._objects, self._groups, self._departed, self._listed):
            known.clear()
        for kind, document in objects:
            self._tell(kind, document)

    def relist(self, kind: Kind, namespace: str | None) -> Relist:
        return Relist(self, kind, namespace)

    def listed(self, kind: Kind, namespace: str | None, present: Container[ObjectKey], version: int) -> None:
        """`present` is all there was at `version` (in `namespace`): what is older and not among them went unseen."""
        self._listed[kind, namespace] = max(version, self._listed.get((kind, namespace), 0))
        for key, document in list(self._objects.get(kind, {}).items()):
            if namespace in (None, key[0]) and key not in present and version_of(document) <= version:
                self.gone(kind, document, by=version)

    def _keep(self, kind: Kind, document: Object) -> bool:
        """Take in what is admitted of `document`; False when nothing changed because it is old."""
        if self._is_old(kind, document):
            return False
        self._take_in(kind, document)
        return True

    def _take_in(self, kind: Kind, document: Object) -> None:
        before = self._remove(kind, document)
        if before is not None and uid_of(before) != uid_of(document):
            self._depart(before, math.inf)  # its successor is there, whatever is still to come of it
        admitted = self._admit(kind, document)
        if isinstance(admitted, Unfit):
            telemetry.count_unfit(admitted)
            self._depart(document, version_of(document))
            return
        if (unfit := left_out(kind, admitted, document)) is not None:
            telemetry.count_unfit(unfit)
        self._put(kind, admitted)

    def _admit(self, kind: Kind, document: Object) -> Object | Unfit:
        services, present = (self._groups.get((each, namespace_of(document), ""), ()) for each in (SERVICE, kind))
        full = len(present) >= most_of(kind, len(services))
        return too_many(kind, document) if full else admit(kind, document)

    def _is_old(self, kind: Kind, document: Object) -> bool:
        """Versions of one object are ordered integers; those of its predecessor of that name lie before its own."""
        namespace = namespace_of(document)
        before = self.get(kind, namespace, name_of(document))
        if before is not None:
            known = version_of(before)
        else:
            known = max(self._listed.get((kind, scope), 0) for scope in (None, namespace))
        return version_of(document) <= max(known, self._departed.get(uid_of(document), 0))

    def _end(self, kind: Kind, document: Object, by: float) -> Object | None:
        """Forget `document`; returns it if it was there. Its successor of that name, or a newer state, stays."""
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

    def _put(self, kind: Kind, document: Object) -> None:
        self._objects.setdefault(kind, {})[namespace_of(document), name_of(document)] = document
        for group in _groups(kind, document):
            self._groups.setdefault(group, {})[name_of(document)] = document

    def _remove(self, kind: Kind, document: Object) -> Object | None:
        before = self._objects.get(kind, {}).pop((namespace_of(document), name_of(document)), None)
        for group in _groups(kind, before) if before is not None else ():
            del self._groups[group][name_of(document)]
            if not self._groups[group]:
                del self._groups[group]
        return before

    def _tell(self, kind: Kind, document: Object) -> None:
        for listener in self._listeners:
            listener(kind, document)


class Relist:
    """One list of a kind (in a namespace), page by page."""

    def __init__(self, cache: Cache, kind: Kind, namespace: str | None) -> None:
        self._cache = cache
        self._kind = kind
        self._namespace = namespace
        self._present: set[ObjectKey] = set()

    def page(self, documents: Iterable[Object]) -> None:
        for document in documents:
            self._present.add((namespace_of(document), name_of(document)))
            self._cache.seen(self._kind, document)

    def end(self, version: int) -> None:
        """The pages were all there was at `version`."""
        self._cache.listed(self._kind, self._namespace, self._present, version)


def content(kind: Kind, document: Object) -> Object:
    """`document` without what must wake nobody: the version, and a service's status, which Outrider itself writes."""
    metadata = {name: value for name, value in document["metadata"].items() if name != "resourceVersion"}
    body = {name: value for name, value in document.items() if not (kind == SERVICE and name == "status")}
    return {**body, "metadata": metadata}


def version_of(document: Object) -> int:
    """Resource versions are integers that grow over all objects of a kind (Kubernetes 1.35 promises it)."""
    return int(document["metadata"]["resourceVersion"])


def _groups(kind: Kind, document: Object) -> list[_Group]:
    labels = labels_of(document)
    values = ["", *(f"{name}={labels[name]}" for name in _LABELS if name in labels)]
    return [(kind, namespace_of(document), value) for value in values]
