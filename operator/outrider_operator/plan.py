"""The plan, which is the output of `decide(observed, settings) -> Plan`: writes, status, events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from outrider_crds.base import digest
from outrider_crds.status import SpeculativeServiceStatus

from outrider_operator.cluster_model import PROFILING, SERVING, ApiRefusal, Object
from outrider_operator.validation.reading import component


@dataclass(frozen=True)
class Delete:
    kind: str
    name: str
    uid: str
    """Precondition: another object of the same name is left alone."""
    resource_version: str | None = None
    """Precondition if the object must not have changed since it was read, such as a shared profile."""
    component: str = SERVING
    """Component label of the object."""
    namespace: str = ""
    """Namespace of the object; empty: the service's."""


@dataclass(frozen=True)
class Adoption:
    """Change one owner reference of an object that is never applied, by a strategic merge patch."""

    kind: str
    name: str
    uid: str
    owner: Object
    """The owner reference to add, or {"$patch": "delete", "uid": ...} to remove one."""
    resource_version: str | None = None
    """Precondition if no other owner may have been removed since the object was read."""
    component: str = PROFILING
    """Component label of the object."""


@dataclass(frozen=True)
class Annotate:
    """Set annotations on a pod by a merge patch, with the uid as a precondition."""

    pod: str
    uid: str
    annotations: Mapping[str, str]


@dataclass(frozen=True)
class Event:
    """Kubernetes Event about the service."""

    warning: bool
    reason: str
    message: str


Write = Object | Adoption | Annotate | Delete


@dataclass(frozen=True)
class Plan:
    """Writes in this order: create, apply, adopt, annotate, delete, write the status, post the events.

    Each write may be skipped or repeated: the next reconcile decides again. Writes of one plan do not depend on each
    other: an object is planned only after everything that it needs exists.
    """

    create: tuple[Object, ...] = ()
    """Objects that did not exist. If one of the same name exists by now, it is left alone."""
    apply: tuple[Object, ...] = ()
    """Objects for server-side apply (force, FIELD_MANAGER). The metadata has the uid of the object that was read, and
    of a shared object its resourceVersion."""
    adopt: tuple[Adoption, ...] = ()
    annotate: tuple[Annotate, ...] = ()
    delete: tuple[Delete, ...] = ()
    """Objects to delete with background propagation. NotFound and a failed precondition count as success."""
    read: tuple[str, ...] = ()
    """Names of ConfigMaps whose contents the decision needs. Nothing else is planned before they are read."""
    read_shared: tuple[str, ...] = ()
    """Names of ConfigMaps in the operator's namespace whose contents the decision needs."""
    profiles: tuple[str, ...] = ()
    """Names of profiles, and of their Jobs, that the decision used. The service is reconciled when one changes."""
    shared: frozenset[str] = frozenset()
    """Names of profiles that are written or whose Job is deleted: other services may wait for that."""
    published: frozenset[str] = frozenset()
    """Names of profiles that are stored for all namespaces: services of any namespace may wait for them."""
    status: SpeculativeServiceStatus = field(default_factory=SpeculativeServiceStatus)
    events: tuple[Event, ...] = ()
    """Events to post once the status is written."""
    requeue_after_s: float | None = None
    """Seconds until the next reconcile if nothing happens; None: the next watch event or resync is early enough."""

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to read or write, except perhaps the status."""
        return not (self.create or self.apply or self.adopt or self.annotate or self.delete or self.reads)

    @property
    def reads(self) -> bool:
        """True if contents must be read before anything else is planned."""
        return bool(self.read or self.read_shared)

    def without(self, refusals: tuple[ApiRefusal, ...]) -> Plan:
        """The plan without the writes that the API server refuses."""
        refused = {refusal.write for refusal in refusals}
        if not refused:
            return self
        kinds = ("create", "apply", "adopt", "annotate", "delete")
        kept: dict[str, Any] = {
            kind: tuple(write for write in getattr(self, kind) if fingerprint(write) not in refused) for kind in kinds
        }
        return replace(self, **kept)


def component_of(write: Write) -> str:
    """Component label of the object that is written."""
    match write:
        case Delete() | Adoption():
            return write.component
        case Annotate():
            return SERVING
    return component(write)


def fingerprint(write: Write) -> str:
    """Digest of a write: equal for equal writes."""
    return digest(write if isinstance(write, dict) else asdict(write))
