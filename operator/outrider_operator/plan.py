"""What the operator wants done: `decide(observed, settings) -> Plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from outrider_crds.base import digest
from outrider_crds.status import SpeculativeServiceStatus

from outrider_operator.inbound.reading import component
from outrider_operator.model import PROFILING, SERVING, Object, Rejection


@dataclass(frozen=True)
class Delete:
    kind: str
    name: str
    uid: str
    """Precondition: another object of that name is left alone."""
    resource_version: str | None = None
    """Precondition where the object must not have changed since (a shared profile that gained a user)."""
    component: str = SERVING
    """What the object is for."""
    namespace: str = ""
    """The service's own when empty."""


@dataclass(frozen=True)
class Adoption:
    """Change one owner reference of an object that is never applied: a strategic merge patch with the uid given."""

    kind: str
    name: str
    uid: str
    owner: Object
    """The reference to add; or {"$patch": "delete", "uid": ...} to take one off."""
    resource_version: str | None = None
    """Precondition where nobody else must have left meanwhile."""
    component: str = PROFILING
    """What the object is for."""


@dataclass(frozen=True)
class Annotate:
    """Set annotations on a pod (merge patch, with the uid as a precondition)."""

    pod: str
    uid: str
    annotations: Mapping[str, str]


@dataclass(frozen=True)
class Event:
    """Posted on the service."""

    warning: bool
    reason: str
    message: str


Write = Object | Adoption | Annotate | Delete


@dataclass(frozen=True)
class Plan:
    """What to do, in this order: create, apply, adopt, annotate, delete, write the status, post the events.

    Each write is safe to skip or to repeat: the next look decides again from what it then sees. None stands on
    another one of its plan: what an object needs was seen to be there before the object is planned.
    """

    create: tuple[Object, ...] = ()
    """Objects that were seen to be absent. One of that name that is there by now is left alone."""
    apply: tuple[Object, ...] = ()
    """Server-side apply (force, FIELD_MANAGER) on the object that was seen: its uid, and where the object is shared
    its resourceVersion, is in the metadata."""
    adopt: tuple[Adoption, ...] = ()
    annotate: tuple[Annotate, ...] = ()
    delete: tuple[Delete, ...] = ()
    """With background propagation; NotFound and a failed precondition are success."""
    read: tuple[str, ...] = ()
    """Names of ConfigMaps whose contents the decision needs and was not shown: nothing else is planned before that."""
    read_shared: tuple[str, ...] = ()
    """Names of ConfigMaps in the operator's namespace to be read likewise."""
    profiles: tuple[str, ...] = ()
    """Names of the profiles that the decision asks for, which are the names of their Jobs too: it hears of a change."""
    shared: frozenset[str] = frozenset()
    """Those of which the contents are written, or the Job deleted: other services wait for that."""
    published: frozenset[str] = frozenset()
    """Those that are stored for all namespaces: services of each wait for that."""
    status: SpeculativeServiceStatus = field(default_factory=SpeculativeServiceStatus)
    events: tuple[Event, ...] = ()
    """To be posted once the status is written."""
    requeue_after_s: float | None = None
    """Look again after this time even if nothing happens; None: the next watch event or resync is early enough."""

    @property
    def is_idle(self) -> bool:
        """True when there is nothing to do but, perhaps, to write the status."""
        return not (self.create or self.apply or self.adopt or self.annotate or self.delete or self.reads)

    @property
    def reads(self) -> bool:
        """True when nothing else is planned before contents are read."""
        return bool(self.read or self.read_shared)

    def without(self, rejections: tuple[Rejection, ...]) -> Plan:
        """The plan less the writes that the API server refuses."""
        refused = {rejection.write for rejection in rejections}
        if not refused:
            return self
        return replace(
            self,
            create=tuple(write for write in self.create if fingerprint(write) not in refused),
            apply=tuple(write for write in self.apply if fingerprint(write) not in refused),
            adopt=tuple(write for write in self.adopt if fingerprint(write) not in refused),
            annotate=tuple(write for write in self.annotate if fingerprint(write) not in refused),
            delete=tuple(write for write in self.delete if fingerprint(write) not in refused),
        )


def component_of(write: Write) -> str:
    """What the object is for that is written, as its component label says."""
    match write:
        case Delete() | Adoption():
            return write.component
        case Annotate():
            return SERVING
    return component(write)


def fingerprint(write: Write) -> str:
    """Equal for equal writes."""
    return digest(write if isinstance(write, dict) else asdict(write))
