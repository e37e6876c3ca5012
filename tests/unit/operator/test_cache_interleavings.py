"""The cache is right whatever the order in which lists, watch events and answers to its own writes come in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from outrider_operator.cluster.cache import ObjectCache, ObjectKey, version_of
from outrider_operator.cluster_model import COMPONENT_LABEL, SERVING
from outrider_operator.kinds import DEPLOYMENT
from outrider_operator.validation.reading import uid_of

from tests.unit.operator.documents import OWNER, labels

NAMES = st.sampled_from(["a", "b", "c"])


@dataclass
class _List:
    """A snapshot on its way, page by page."""

    version: int
    present: set[ObjectKey]
    pages: deque[list[dict[str, Any]]] = field(default_factory=deque)


class _Interleavings(RuleBasedStateMachine):
    """A model of the API server, and the ways by which its news travels."""

    @initialize()
    def begin(self) -> None:
        self.cache = ObjectCache()
        self.server: dict[str, dict[str, Any]] = {}
        self.unlabelled: dict[str, dict[str, Any]] = {}
        self.version = 0
        self.events: deque[tuple[str, dict[str, Any]]] = deque()
        self.answers: deque[tuple[str, dict[str, Any]]] = deque()
        self.resync: _List | None = None
        self.recovery: _List | None = None
        self.newest: dict[str, int] = {}

    @rule(name=NAMES, ours=st.booleans(), by_operator=st.booleans())
    def write(self, name: str, ours: bool, by_operator: bool) -> None:
        """Another client creates or changes an object, with or without Outrider's owner."""
        if name in self.unlabelled:
            return
        self.version += 1
        uid = uid_of(self.server[name]) if name in self.server else f"{name}-{self.version}"
        kind = "MODIFIED" if name in self.server else "ADDED"
        self.server[name] = _document(name, uid, self.version, ours)
        self.events.append((kind, self.server[name]))
        if by_operator:
            self.answers.append(("written", self.server[name]))

    @precondition(lambda self: self.server)
    @rule(data=st.data(), by_operator=st.booleans())
    def delete(self, data: st.DataObject, by_operator: bool) -> None:
        document = self.server.pop(data.draw(st.sampled_from(sorted(self.server))))
        self.events.append(("DELETED", self._newer(document)))
        if by_operator:
            self.answers.append(("deleted", document))

    @precondition(lambda self: self.server)
    @rule(data=st.data())
    def lose_label(self, data: st.DataObject) -> None:
        """A watch with a selector reports it as deleted."""
        name = data.draw(st.sampled_from(sorted(self.server)))
        self.unlabelled[name] = self._newer(self.server.pop(name))
        self.events.append(("DELETED", self.unlabelled[name]))

    @precondition(lambda self: self.unlabelled)
    @rule(data=st.data(), by_operator=st.booleans())
    def get_label_back(self, data: st.DataObject, by_operator: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.unlabelled)))
        self.server[name] = self._newer(self.unlabelled.pop(name))
        self.events.append(("ADDED", self.server[name]))
        if by_operator:
            self.answers.append(("written", self.server[name]))

    @precondition(lambda self: self.events and self.recovery is None)
    @rule()
    def watch_delivers(self) -> None:
        event, document = self.events.popleft()
        (self.cache.left if event == "DELETED" else self.cache.seen)(DEPLOYMENT, document)

    @precondition(lambda self: self.answers)
    @rule()
    def answer_arrives(self) -> None:
        """Answers about one object come in order: the operator writes it one request after the other."""
        what, document = self.answers.popleft()
        (self.cache.wrote if what == "written" else self.cache.wrote_deletion)(DEPLOYMENT, document)

    @precondition(lambda self: self.recovery is None)
    @rule()
    def watch_breaks(self) -> None:
        """Its events are lost; it lists, and goes on from there."""
        self.events.clear()
        self.recovery = self._list()

    @precondition(lambda self: self.resync is None)
    @rule()
    def resync_lists(self) -> None:
        self.resync = self._list()

    @precondition(lambda self: self.recovery is not None or self.resync is not None)
    @rule(recovery_first=st.booleans())
    def page_arrives(self, recovery_first: bool) -> None:
        if self.recovery is not None and (recovery_first or self.resync is None):
            self.recovery = self._deliver(self.recovery)
        elif self.resync is not None:
            self.resync = self._deliver(self.resync)

    @invariant()
    def no_object_grows_younger(self) -> None:
        for document in self.cache.all(DEPLOYMENT):
            uid, version = uid_of(document), version_of(document)
            assert version >= self.newest.get(uid, 0)
            self.newest[uid] = version

    def teardown(self) -> None:
        """Once all news has arrived, the cache holds what the server holds, of what is Outrider's."""
        while self.recovery is not None or self.resync is not None:
            self.page_arrives(recovery_first=True)
        while self.events:
            self.watch_delivers()
        while self.answers:
            self.answer_arrives()
        ours = {name: document for name, document in self.server.items() if document["metadata"].get("ownerReferences")}
        cached = {document["metadata"]["name"]: document for document in self.cache.all(DEPLOYMENT)}
        assert {name: version_of(child) for name, child in cached.items()} == {
            name: version_of(child) for name, child in ours.items()
        }
        assert {uid_of(child) for child in self.cache.labelled(DEPLOYMENT, "ns", COMPONENT_LABEL, SERVING)} == {
            uid_of(child) for child in ours.values()
        }

    def _newer(self, document: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        return {**document, "metadata": {**document["metadata"], "resourceVersion": str(self.version)}}

    def _list(self) -> _List:
        documents = [document for _, document in sorted(self.server.items())]
        pages = deque([documents[:1], documents[1:]])
        return _List(self.version, {("ns", name) for name in self.server}, pages)

    def _deliver(self, under_way: _List) -> _List | None:
        if not under_way.pages:
            self.cache.listed(DEPLOYMENT, None, under_way.present, under_way.version)
            return None
        for document in under_way.pages.popleft():
            self.cache.seen(DEPLOYMENT, document)
        return under_way


def _document(name: str, uid: str, version: int, ours: bool) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": labels(name),
    }
    return {"metadata": metadata | ({"ownerReferences": [OWNER]} if ours else {})}


TestInterleavings = pytest.mark.slow(_Interleavings.TestCase)
TestInterleavings.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
