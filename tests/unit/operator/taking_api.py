"""An API server that takes every write, for tests of the operator's edge."""

from __future__ import annotations

from outrider_operator.cluster.api_error import ApiError
from outrider_operator.cluster_model import Object
from outrider_operator.kinds import ResourceKind


class TakingApi:
    """Remembers the kind of every write, the last document of each, and how much was read; holds nothing."""

    def __init__(self, refuses: str = "", status: int = 422, causes: frozenset[str] = frozenset()) -> None:
        self.written: list[str] = []
        self.reads = 0
        self.documents: dict[str, Object] = {}
        self._refuses, self._status, self._causes = refuses, status, causes
        self._version = 10

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> Object | None:
        del kind, namespace, name
        self.reads += 1
        return None

    async def some(self, kind: ResourceKind, namespace: str, *, fields: str = "", pages: int = 1) -> list[Object]:
        del kind, namespace, fields, pages
        self.reads += 1
        return []

    async def create(self, document: Object) -> Object:
        return self._take(document["kind"], document)

    async def apply(self, document: Object) -> Object:
        return self._take(document["kind"], document)

    async def patch(self, document: Object) -> Object:
        metadata = {**self.documents[document["kind"]]["metadata"], **document["metadata"]}
        return self._take(document["kind"], {**self.documents[document["kind"]], "metadata": metadata})

    async def delete(self, document: Object, preconditions: dict[str, str]) -> Object | None:
        del preconditions
        self.written.append(f"delete {document['kind']}")
        return None

    async def replace(self, document: Object, subresource: str | None = None) -> Object:
        return self._take(subresource or document["kind"], document)

    def _take(self, what: str, document: Object) -> Object:
        self.written.append(what)
        if what == self._refuses:
            raise ApiError(self._status, "", "no", self._causes)
        self._version += 1
        metadata = {"uid": f"uid-{self._version}", **document["metadata"], "resourceVersion": str(self._version)}
        self.documents[what] = {**document, "metadata": metadata}
        return self.documents[what]
