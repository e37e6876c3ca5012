"""One reconcile of a service: observe, decide, apply, write the status, post the events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider_crds.status import ConditionStatus, ConditionType, SpeculativeServiceStatus

from outrider_operator.apply import RETRY_REFUSED_S, Applier
from outrider_operator.cache import Cache
from outrider_operator.frame import Events
from outrider_operator.kinds import SERVICE
from outrider_operator.measurements import Measurements
from outrider_operator.model import Object, Observed, Plan, Rejection, Settings
from outrider_operator.observe import Observer
from outrider_operator.status_writer import StatusWriter
from outrider_operator.work_queue import Key

Decide = Callable[[Observed, Settings], Plan]


@dataclass(frozen=True)
class _Refused:
    generation: int
    rejections: tuple[Rejection, ...]


class Reconciler:
    def __init__(
        self,
        cache: Cache,
        observer: Observer,
        applier: Applier,
        status_writer: StatusWriter,
        measurements: Measurements,
        events: Events,
        decide: Decide,
        settings: Settings,
    ) -> None:
        self._cache = cache
        self._observer = observer
        self._applier = applier
        self._status_writer = status_writer
        self._measurements = measurements
        self._events = events
        self._decide = decide
        self._settings = settings
        self._refused: dict[Key, _Refused] = {}
        self._shown: set[Key] = set()
        """Services that got, or should have got, their first conditions."""

    async def reconcile(self, key: Key) -> float | None:
        """Bring the cluster closer to what the service asks for; returns when to look again, in seconds.

        Raises ObserveAgain, ApiError or UNREACHABLE; the caller tries again later.
        """
        service = self._cache.get(SERVICE, key.namespace, key.name)
        if service is None:
            self.forget(key)
            return None
        if "deletionTimestamp" in service["metadata"]:
            return None  # garbage collection removes the children; making new ones would hold it up
        observed = await self._observer.observe(service, self._rejections(key, service))
        plan = self._decide(observed, self._settings)
        if self._is_new(key, observed):
            plan = Plan(status=plan.status, events=plan.events, requeue_after_s=0.0)
        rejections = await self._applier.carry_out(plan, key.namespace)
        self._note(key, service, rejections)
        if rejections != observed.rejections:
            plan = self._decide(replace(observed, rejections=rejections), self._settings)
        figures_due_s = await self._status_writer.write(service, observed.status, plan.status)
        self._measurements.expect_news(key, not _updated(plan.status))
        for event in plan.events if figures_due_s is None else ():
            self._events.post(service, warning=event.warning, reason=event.reason, message=event.message)
        return _earliest(plan.requeue_after_s, figures_due_s, RETRY_REFUSED_S if rejections else None)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a service that is gone."""
        self._refused.pop(key, None)
        self._shown.discard(key)
        self._applier.forget(key.namespace, key.name)
        self._status_writer.forget(key)
        self._measurements.forget(key)

    def _is_new(self, key: Key, observed: Observed) -> bool:
        """True once for a service without conditions: of many new ones, each shows where it stands before any gets
        its children, which take several times as many writes."""
        new = not observed.status.conditions and key not in self._shown
        self._shown.add(key)
        return new

    def _rejections(self, key: Key, service: Object) -> tuple[Rejection, ...]:
        refused = self._refused.get(key)
        if refused is None or refused.generation != service["metadata"]["generation"]:
            return ()
        return refused.rejections

    def _note(self, key: Key, service: Object, rejections: tuple[Rejection, ...]) -> None:
        if rejections:
            self._refused[key] = _Refused(service["metadata"]["generation"], rejections)
        else:
            self._refused.pop(key, None)


def _updated(status: SpeculativeServiceStatus) -> bool:
    return any(c.type == ConditionType.UPDATED and c.status == ConditionStatus.TRUE for c in status.conditions)


def _earliest(*times_s: float | None) -> float | None:
    given = [time_s for time_s in times_s if time_s is not None]
    return min(given) if given else None
