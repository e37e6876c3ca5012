"""One reconcile of a service: observe, decide, apply, write the status, post the events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from outrider_crds.conditions import find_condition
from outrider_crds.status import ConditionStatus, ConditionType, Reason, SpeculativeServiceStatus

from outrider_operator.apply import Applier
from outrider_operator.cache import Cache
from outrider_operator.events import Events
from outrider_operator.inbound.reading import items
from outrider_operator.kinds import SERVICE
from outrider_operator.kubernetes_api import ApiError
from outrider_operator.measurements import Measurements
from outrider_operator.model import Object, Observed, Settings
from outrider_operator.observe import Observer
from outrider_operator.plan import Plan
from outrider_operator.profile_users import ProfileUsers
from outrider_operator.refusals import Refusals
from outrider_operator.status_writer import StatusWriter
from outrider_operator.work_queue import Key

Decide = Callable[[Observed, Settings], Plan]

_LOOKS = 8
"""In one reconcile: reading contents takes three, the children of a new service two, each refusal one more."""
_GO_ON_S = 1.0
"""What the operator writes itself wakes nobody."""


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
        users: ProfileUsers,
        wake: Callable[[Key], None],
    ) -> None:
        self._cache = cache
        self._observer = observer
        self._applier = applier
        self._status_writer = status_writer
        self._measurements = measurements
        self._events = events
        self._decide = decide
        self._settings = settings
        self._users = users
        self._wake = wake
        self._refusals: dict[Key, Refusals] = {}
        self._computing = asyncio.Lock()
        """One decision in a turn of the event loop: what is urgent, the Lease above all, waits for one, not for each
        worker's."""
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
        try:
            observed, plan = await self._act(key, service)
        except ApiError as error:
            if error.namespace_ends:
                return None  # the service goes, too
            raise
        figures_due_s = await self._status_writer.write(service, observed.status, plan.status)
        self._measurements.expect_news(key, _awaits_pods(plan.status))
        for event in plan.events if figures_due_s is None else ():
            await self._events.post(service, event)
        due_s = self._refusals[key].due_in_s(_clock())
        return _earliest(plan.requeue_after_s, figures_due_s, due_s, None if plan.is_idle else _GO_ON_S)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a service that is gone."""
        self._refusals.pop(key, None)
        self._shown.discard(key)
        self._status_writer.forget(key)
        self._measurements.forget(key)
        self._users.forget(key)

    async def _act(self, key: Key, service: Object) -> tuple[Observed, Plan]:
        """Look, decide and write until there is nothing left to write: each step is decided on what the one before it
        brought about, so that nothing is made before what it stands on is there."""
        refusals, is_new = self._refusals_of(key, service), self._is_new(key, service)
        for _ in range(_LOOKS):
            observed = await self._observer.observe(service, refusals.in_force(_clock()), is_new=is_new)
            async with self._computing:
                plan = self._decide(observed, self._settings)
                await asyncio.sleep(0)  # held over the end of this turn: the next worker's is for the next one
            if plan.reads:
                await self._observer.read(key.namespace, plan.read)
                await self._observer.read(self._settings.namespace, plan.read_shared)
                continue
            if is_new:
                self._shown.add(key)
                return observed, Plan(status=plan.status, events=plan.events, requeue_after_s=0.0)
            unheard_of = self._users.note(key, plan.profiles)
            await self._write(key, plan, refusals)
            if plan.is_idle and not unheard_of:
                break
        return observed, plan

    async def _write(self, key: Key, plan: Plan, refusals: Refusals) -> None:
        """Raises what kept a part of `plan` from being tried; what was refused before that is noted all the same."""
        outcome = await self._applier.carry_out(plan, key.namespace, patient=refusals.patient)
        refusals.note(outcome.refused, _clock(), all_tried=outcome.stopped is None)
        self._wake_others(key, plan.shared, plan.published)
        if isinstance(outcome.stopped, ApiError) and outcome.stopped.busy:
            refusals.postpone()
        if outcome.stopped is not None:
            raise outcome.stopped

    def _wake_others(self, key: Key, profiles: Iterable[str], published: Iterable[str]) -> None:
        """What the operator writes itself wakes nobody, but what it writes for one service others wait for."""
        neighbours = {user for name in profiles for user in self._users.of(key.namespace, name)}
        everywhere = {user for name in published for user in self._users.everywhere(name)}
        for user in (neighbours | everywhere) - {key}:
            self._wake(user)

    def _is_new(self, key: Key, service: Object) -> bool:
        """True once for a service without conditions: of many new ones, each shows where it stands before any gets
        its children, which take twenty times as many requests."""
        return not items(service, "status", "conditions") and key not in self._shown

    def _refusals_of(self, key: Key, service: Object) -> Refusals:
        """A changed spec is tried at once, whatever was refused before."""
        generation = service["metadata"]["generation"]
        known = self._refusals.get(key)
        if known is None or known.generation != generation:
            known = self._refusals[key] = Refusals(generation)
        return known


def _clock() -> float:
    return asyncio.get_running_loop().time()


_UNHURRIED = frozenset({Reason.CANARY_RUNNING, Reason.CANARY_FAILED, Reason.CANARY_ERROR, Reason.CANARY_INCONCLUSIVE})
"""Reasons of Updated that may stand for hours: no pod is about to say something new."""


def _awaits_pods(status: SpeculativeServiceStatus) -> bool:
    """Is there something that only the pods can tell, so that each is read often?"""
    updated = find_condition(status.conditions, ConditionType.UPDATED)
    if updated is None:
        return True
    return updated.status is not ConditionStatus.TRUE and updated.reason not in _UNHURRIED


def _earliest(*times_s: float | None) -> float | None:
    given = [time_s for time_s in times_s if time_s is not None]
    return min(given) if given else None
