"""The controller: wakes services when something changes, runs the workers, and acts only while it has the Lease."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from outrider_operator import cluster_model, kinds
from outrider_operator.cluster.api_error import UNREACHABLE, ApiError
from outrider_operator.cluster.apply import ObserveAgain
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster.lease import Lease
from outrider_operator.cluster.serving_pods import ServingPods
from outrider_operator.cluster_model import Object, OperatorSettings
from outrider_operator.controller import gc_freeze
from outrider_operator.controller.profile_users import ProfileUsers
from outrider_operator.controller.reconcile import Decide, Reconciler
from outrider_operator.controller.selected_pods import SelectedPods
from outrider_operator.controller.supervision import Supervisor
from outrider_operator.controller.watches import Watches
from outrider_operator.controller.work_queue import CHILD_CHANGE_S, OWN_CHANGE_S, SHARED_CHANGE_S, WorkQueue
from outrider_operator.decide.pod_spec.volumes import profile_shared_as
from outrider_operator.kinds import ResourceKind
from outrider_operator.operator_metrics import telemetry
from outrider_operator.service_metrics.measurements import Measurements
from outrider_operator.service_metrics.prometheus import Connection, PrometheusFigures
from outrider_operator.validation.reading import component, label, name_of, namespace_of

logger = logging.getLogger(__name__)

WORKERS = 48
"""Concurrent reconciles. A reconcile mostly waits for the API server, so few workers would serialize a burst."""
MOST_OF_A_NAMESPACE = 16
"""Concurrent reconciles of one namespace."""
LONGEST_HOLD_S = 5.0
"""Seconds after which a worker leaves a slow reconcile, which continues on its own. Otherwise the webhooks of a few
namespaces that do not answer would occupy every worker for a minute."""
LONGEST_RECONCILE_S = 600.0
"""Seconds after which a reconcile is cancelled and retried. The API server gives up on a webhook after 30 s and on a
request after a minute, and a reconcile makes a dozen requests."""
STUCK_AFTER_S = LONGEST_RECONCILE_S + 60.0
"""Age of a reconcile that even its cancellation did not end. Only a restart of the process helps."""


class ServiceController:
    """The operator's work, which kopf starts and stops."""

    def __init__(self, settings: OperatorSettings, api: KubernetesApi, lease: Lease, decide: Decide) -> None:
        self._settings = settings
        self._api = api
        self._queue = WorkQueue(MOST_OF_A_NAMESPACE)
        self._cache = ObjectCache()
        telemetry.SERVICES.set_function(partial(self._cache.count, kinds.SERVICE))
        telemetry.QUEUE_LENGTH.set_function(lambda: len(self._queue))
        telemetry.OLDEST_RECONCILE_SECONDS.set_function(lambda: self._queue.oldest_s())
        self._users = ProfileUsers()
        self._supervisor = Supervisor()
        self._selected = SelectedPods(api, self._cache, self._wake_one)
        pods, prometheus = ServingPods(self._cache, self._selected), _prometheus(settings)
        self._measurements = Measurements(self._cache, pods, self._wake_one, prometheus, settings.metrics_window_s)
        self._reconciler = Reconciler(
            api, self._cache, self._measurements, self._users, settings, decide, self._wake_one
        )
        self._lease = lease
        self._cache.subscribe(self._wake)
        self._watches: Watches | None = None
        self._task: asyncio.Task[None] | None = None
        self.failed = False
        """True if the work ended by itself, which it never should."""

    async def start(self) -> None:
        """Wait for the CustomResourceDefinition, then start working. Called once."""
        await self._wait_for_definition()
        self._task = asyncio.create_task(self._run(), name="controller")
        self._task.add_done_callback(self._note_end)

    async def stop(self) -> None:
        """Stop working, then release the Lease so that another operator can start at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._lease.release()

    def services(self) -> Iterable[Object]:
        """The services that this process manages: none while it stands by."""
        return self._cache.all(kinds.SERVICE) if self._lease.is_held else ()

    def is_stuck(self) -> bool:
        """Does a reconcile run for so long that the process must be restarted?"""
        return self._queue.oldest_s() > STUCK_AFTER_S

    def health(self) -> dict[str, Any]:
        unlisted = self._watches.unlisted() if self._watches is not None else []
        return {
            "leading": self._lease.is_held,
            "unlisted": unlisted,
            "tasks": self._supervisor.health(),
            "oldestReconcileSeconds": round(self._queue.oldest_s(), 1),
        }

    async def _wait_for_definition(self) -> None:
        while True:
            try:
                if await self._api.serves(kinds.SERVICE):
                    return
                logger.warning("The CustomResourceDefinition of %s is not installed yet; waiting", kinds.SERVICE.kind)
            except (ApiError, *UNREACHABLE) as error:
                logger.warning("Cannot reach the API server yet: %r", error)
            await asyncio.sleep(1.0)

    async def _run(self) -> None:
        """Work while this process holds the Lease. After losing it, stand by and try again."""
        while True:
            await self._lease.acquire()
            work = asyncio.create_task(self._work(), name="work")
            renewals = asyncio.create_task(self._lease.renew(), name="lease")
            try:
                await asyncio.wait([work, renewals], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (work, renewals):
                    task.cancel()
                await asyncio.wait([work, renewals])
            if not work.cancelled():
                work.result()  # raises what ended it
            self._cache.clear()
            logger.warning("Lost the Lease, so this operator stops working until it holds it again")

    async def _work(self) -> None:
        self._queue = WorkQueue(MOST_OF_A_NAMESPACE)  # nothing of a former leadership is left in it
        self._watches = Watches(self._api, self._cache, self._settings)
        async with asyncio.TaskGroup() as group:
            workers = {f"worker {number}": partial(self._worker, group) for number in range(1, WORKERS + 1)}
            tasks = {**self._watches.tasks(), **self._measurements.tasks(), "collector": gc_freeze.run}
            tasks["pods of other workloads"] = self._selected.run
            self._spawn(group, tasks)
            await self._watches.listed()
            await self._selected.listed()
            await self._measurements.first_round()
            self._spawn(group, {"resync": self._resync, **workers})

    def _spawn(self, group: asyncio.TaskGroup, tasks: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        for name, task in tasks.items():
            group.create_task(self._supervisor.supervise(name, task), name=name)

    async def _worker(self, group: asyncio.TaskGroup) -> None:
        while True:
            key = await self._queue.get()
            reconcile = group.create_task(self._reconcile(key), name=f"reconcile of {key}")
            # A task that is cancelled before its first step runs none of its own code.
            reconcile.add_done_callback(partial(_release, self._queue, key))
            await asyncio.wait([reconcile], timeout=LONGEST_HOLD_S)

    async def _reconcile(self, key: Key) -> None:
        """Run one reconcile. An error is logged with its reason, and the reconcile is retried."""
        try:
            if self._watches is not None and not self._watches.knows(key.namespace):
                raise ObserveAgain("not all of its namespace was listed yet")
            if not self._selected.knows(key):
                raise ObserveAgain("the pods that it selects were not listed yet")
            with telemetry.RECONCILE_SECONDS.time():
                async with asyncio.timeout(LONGEST_RECONCILE_S):
                    look_again_s = await self._reconciler.reconcile(key)
        except ObserveAgain as change:
            logger.debug("%s: %s", key, change)
            self._retry(key, "observed again")
        except (ApiError, *UNREACHABLE) as error:
            logger.warning(
                "%s: trying again in %.1f s: %s", key, self._retry(key, "retried"), str(error) or repr(error)
            )
        except Exception:
            # A defect must not stop the other services; the back-off keeps it from spinning.
            logger.exception("%s: trying again in %.1f s after an unexpected error", key, self._retry(key, "failed"))
        else:
            telemetry.RECONCILES.labels(outcome="done").inc()
            self._queue.reset(key)
            if look_again_s is not None:
                self._queue.add_after(key, look_again_s)

    def _retry(self, key: Key, outcome: str) -> float:
        telemetry.RECONCILES.labels(outcome=outcome).inc()
        return self._queue.retry(key)

    async def _resync(self) -> None:
        """Reconcile every service now and then, in case a wake-up was lost."""
        self._wake_all()
        while True:
            await self._wake_slowly(self._settings.resync_interval_s)

    async def _wake_slowly(self, within_s: float) -> None:
        """Wake all services, spread over `within_s`: a thousand at once would block the event loop and the API
        server."""
        services = list(self._cache.all(kinds.SERVICE))
        for service in services:
            self._queue.add(Key.of(service))
            await asyncio.sleep(within_s / len(services))
        if not services:
            await asyncio.sleep(within_s)

    def _wake(self, kind: ResourceKind, document: Object) -> None:
        """Wake the services that a changed object concerns."""
        if kind == kinds.SERVICE:
            self._queue.add(Key.of(document), OWN_CHANGE_S)
        elif kind == kinds.NODE:
            self._wake_all()
        else:
            for key in self._users_of(document):
                self._wake_one(key)

    def _users_of(self, document: Object) -> Iterable[Key]:
        """The services that a child concerns. A profile is shared, as are its Job and that Job's pods."""
        namespace = namespace_of(document)
        if component(document) == cluster_model.SHARED_PROFILE and namespace == self._settings.namespace:
            return self._users.everywhere(profile_shared_as(name_of(document)))
        if component(document) in (cluster_model.PROFILING, cluster_model.PROFILE):
            return self._users.of(namespace, label(document, cluster_model.JOB_NAME_LABEL) or name_of(document))
        service = label(document, cluster_model.SERVICE_LABEL) or cluster_model.service_of_groups(
            label(document, cluster_model.GROUPS_LABEL)
        )
        return (Key(namespace, service),) if service else ()

    def _wake_all(self) -> None:
        for service in self._cache.all(kinds.SERVICE):
            self._queue.add(Key.of(service), SHARED_CHANGE_S)

    def _wake_one(self, key: Key) -> None:
        self._queue.add(key, CHILD_CHANGE_S)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.error("The operator cannot go on", exc_info=task.exception())
            self.failed = True
            signal.raise_signal(signal.SIGTERM)  # kopf's own way to end; its stop flag delays every end by 5 s


def _release(queue: WorkQueue, key: Key, reconcile: asyncio.Task[None]) -> None:
    queue.release(key)
    if reconcile.cancelled():
        queue.add(key)  # unless the Lease is lost, something that the reconcile waited for was cancelled


def _prometheus(settings: OperatorSettings) -> PrometheusFigures | None:
    """Figures from Prometheus; None if the chart configures no Prometheus."""
    if not settings.prometheus_url:
        return None
    connection = Connection(
        url=settings.prometheus_url,
        ca_file=settings.prometheus_ca_file,
        token_file=settings.prometheus_token_file,
        timeout_s=settings.prometheus_timeout_s,
    )
    return PrometheusFigures(connection, settings.metrics_window_s)
