"""One reconcile of a service: observe, decide, apply, write the status, post the events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider_crds.conditions import ConditionReason, ConditionStatus, ConditionType, find_condition
from outrider_crds.status import SpeculativeServiceStatus

from outrider_operator.cluster.api_error import ApiError
from outrider_operator.cluster.apply import Applier
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster_model import ApiRefusal, Object, Observed, OperatorSettings
from outrider_operator.controller.observe import Observer
from outrider_operator.controller.profile_users import ProfileUsers
from outrider_operator.controller.status_writer import Events, StatusWriter
from outrider_operator.kinds import SERVICE
from outrider_operator.plan import Plan
from outrider_operator.service_metrics.measurements import Measurements
from outrider_operator.validation.reading import items

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
PATIENCE = 5
"""Attempts in a row that a busy API server may fail before that counts as a refusal."""
Decide = Callable[[Observed, OperatorSettings], Plan]
_MAX_ROUNDS = 8
"""Rounds of observe, decide and write in one reconcile. Reading ConfigMaps takes three, a new service's children two,
and each refusal one more."""
_GO_ON_S = 1.0
"""Seconds until the next reconcile after a write, since the operator's own writes trigger none."""
_UNHURRIED = (
    ConditionReason.CANARY_RUNNING, ConditionReason.CANARY_FAILED, ConditionReason.CANARY_ERROR,
    ConditionReason.CANARY_INCONCLUSIVE, ConditionReason.NO_POD_SELECTED, ConditionReason.POD_SHARED,
    ConditionReason.NOT_ACTIVE, ConditionReason.RESTART_NEEDED,
)  # fmt: skip
"""Reasons of Updated that may last for hours, in which pods need not be polled often."""


@dataclass(frozen=True)
class _PausedWrite:
    refusal: ApiRefusal
    pause_s: float
    due_at: float


class RefusalBackoff:
    """Refused writes of one generation of a service. Each refusal doubles the pause before the next attempt."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._paused: dict[str, _PausedWrite] = {}
        self._postponed = 0

    @property
    def patient(self) -> bool:
        """True while a busy API server is retried without reporting it."""
        return self._postponed < PATIENCE

    def in_force(self, at: float) -> tuple[ApiRefusal, ...]:
        """The refusals that are not due for another attempt."""
        return tuple(paused.refusal for paused in self._paused.values() if paused.due_at > at)

    def postpone(self) -> None:
        """Count one attempt for which the API server was too busy."""
        self._postponed += 1

    def note(self, refused: Sequence[ApiRefusal], at: float, *, all_tried: bool = True) -> None:
        """Record the writes that were refused. all_tried: every other write that was due has succeeded."""
        kept = {write: paused for write, paused in self._paused.items() if paused.due_at > at or not all_tried}
        if all_tried and not refused:
            self._postponed = 0
        for refusal in refused:
            before = self._paused.get(refusal.write)
            pause_s = min(LONGEST_PAUSE_S, 2 * before.pause_s) if before is not None else FIRST_PAUSE_S
            kept[refusal.write] = _PausedWrite(refusal, pause_s, at + pause_s)
        self._paused = kept

    def due_in_s(self, at: float) -> float | None:
        """Seconds until the next write is due; None without one."""
        return min((paused.due_at - at for paused in self._paused.values()), default=None)


class Reconciler:
    def __init__(
        self,
        api: KubernetesApi,
        cache: ObjectCache,
        measurements: Measurements,
        users: ProfileUsers,
        settings: OperatorSettings,
        decide: Decide,
        wake: Callable[[Key], None],
    ) -> None:
        self._cache = cache
        self._observer = Observer(api, cache, measurements, settings)
        self._applier = Applier(api, cache)
        self._status_writer = StatusWriter(api, cache)
        self._events = Events(api)
        self._measurements = measurements
        self._users = users
        self._settings = settings
        self._decide = decide
        self._wake = wake
        self._refusals: dict[Key, RefusalBackoff] = {}
        self._computing = asyncio.Lock()
        """Limits decisions to one per turn of the event loop, so that the kubelet's probes and the API server's answers
        wait for one decision and not for those of all workers."""
        self._shown: set[Key] = set()
        """Services whose first conditions were planned."""

    async def reconcile(self, key: Key) -> float | None:
        """Bring the cluster closer to the service's spec. Returns the seconds until the next reconcile.

        Raises ObserveAgain, ApiError or UNREACHABLE; the caller retries later.
        """
        service = self._cache.get(SERVICE, key.namespace, key.name)
        if service is None:
            self.forget(key)
            return None
        if "deletionTimestamp" in service["metadata"]:
            return None  # garbage collection removes the children; new ones would delay it
        try:
            observed, plan = await self._act(key, service)
        except ApiError as error:
            if error.namespace_ends:
                return None  # the service is deleted, too
            raise
        figures_due_s = await self._status_writer.write(service, observed.status, plan.status)
        self._measurements.expect_news(key, _awaits_pods(plan.status))
        for event in plan.events if figures_due_s is None else ():
            await self._events.post(service, event)
        due_s = self._refusals[key].due_in_s(_clock())
        return _earliest(plan.requeue_after_s, figures_due_s, due_s, None if plan.is_idle else _GO_ON_S)

    def forget(self, key: Key) -> None:
        """Remove all state about a service that is gone."""
        self._refusals.pop(key, None)
        self._shown.discard(key)
        self._status_writer.forget(key)
        self._measurements.forget(key)
        self._observer.forget(key)
        self._users.forget(key)

    async def _act(self, key: Key, service: Object) -> tuple[Observed, Plan]:
        """Observe, decide and write until there is nothing left to write.

        Each round starts from the result of the one before it, so that an object is created after its dependencies.
        """
        refusals, is_new = self._refusals_of(key, service), self._is_new(key, service)
        for _ in range(_MAX_ROUNDS):
            observed = await self._observer.observe(service, refusals.in_force(_clock()), is_new=is_new)
            async with self._computing:
                plan = self._decide(observed, self._settings)
                await asyncio.sleep(0)  # the lock spans this turn of the event loop
            if plan.reads:
                await self._observer.read(key.namespace, plan.read)
                await self._observer.read(self._settings.namespace, plan.read_shared)
                continue
            if is_new:
                self._shown.add(key)
                return observed, Plan(status=plan.status, events=plan.events, requeue_after_s=0.0)
            new_profiles = self._users.note(key, plan.profiles)
            await self._write(key, plan, refusals)
            if plan.is_idle and not new_profiles:
                break
        return observed, plan

    async def _write(self, key: Key, plan: Plan, refusals: RefusalBackoff) -> None:
        """Carry out `plan` and record its refusals. Raises the error that stopped it, if any."""
        outcome = await self._applier.carry_out(plan, key.namespace, patient=refusals.patient)
        refusals.note(outcome.refused, _clock(), all_tried=outcome.stopped is None)
        self._wake_others(key, plan.shared, plan.published)
        if isinstance(outcome.stopped, ApiError) and outcome.stopped.busy:
            refusals.postpone()
        if outcome.stopped is not None:
            raise outcome.stopped

    def _wake_others(self, key: Key, profiles: Iterable[str], published: Iterable[str]) -> None:
        """Wake other services that use these profiles: the operator's own writes trigger no reconcile."""
        neighbours = {user for name in profiles for user in self._users.of(key.namespace, name)}
        everywhere = {user for name in published for user in self._users.everywhere(name)}
        for user in (neighbours | everywhere) - {key}:
            self._wake(user)

    def _is_new(self, key: Key, service: Object) -> bool:
        """True once for a service without conditions. Every new service gets conditions before any gets its children,
        which take twenty times as many requests."""
        return not items(service, "status", "conditions") and key not in self._shown

    def _refusals_of(self, key: Key, service: Object) -> RefusalBackoff:
        """The refusals of the current generation. A changed spec is tried at once."""
        generation = service["metadata"]["generation"]
        known = self._refusals.get(key)
        if known is None or known.generation != generation:
            known = self._refusals[key] = RefusalBackoff(generation)
        return known


def _clock() -> float:
    return asyncio.get_running_loop().time()


def _awaits_pods(status: SpeculativeServiceStatus) -> bool:
    """Should pods be polled often, because only they can report that the spec is in force, or adapters are loaded?"""
    adapters = find_condition(status.conditions, ConditionType.ADAPTERS_LOADED)
    is_loading = adapters is not None and adapters.reason == ConditionReason.LOADING
    updated = find_condition(status.conditions, ConditionType.UPDATED)
    if updated is None:
        return True
    return (is_loading or updated.status is not ConditionStatus.TRUE) and updated.reason not in _UNHURRIED


def _earliest(*times_s: float | None) -> float | None:
    known_s = [time_s for time_s in times_s if time_s is not None]
    return min(known_s) if known_s else None
