"""Leader election: only the operator that holds the Lease works, the others stand by.

A process compares only times of its own clock, at which it saw the record change, as client-go does. So clocks that
differ between nodes cannot lead to two holders.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from datetime import UTC, datetime
from enum import Enum
from typing import Any, TypeVar

from outrider_operator.cluster.api_error import UNREACHABLE, ApiError
from outrider_operator.cluster.cache import version_of
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster_model import Object
from outrider_operator.kinds import LEASE
from outrider_operator.operator_metrics import telemetry

_Result = TypeVar("_Result")
logger = logging.getLogger(__name__)
DURATION_S = 15
RENEW_EVERY_S = 5.0
GIVE_UP_AFTER_S = 10.0
RETRY_EVERY_S = 1.0
SETTLE_S = GIVE_UP_AFTER_S
"""Seconds after which a holder whose Lease was deleted has noticed that, or has given up."""


class LoopThread:
    """Runs what must not wait for turns of the main event loop: on a busy machine a turn may take seconds."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `work` in the thread. Cancelling this cancels it there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class Claim(Enum):
    """Result of an attempt to take or renew the Lease."""

    CREATED = "created"
    """The Lease did not exist. Another operator may have held it until a moment ago."""
    RENEWED = "renewed"
    FAILED = "failed"
    """The API server did not answer. The last claim stays valid for a while."""
    LOST = "lost"
    """Another operator holds the Lease, or the cluster was restored from a backup."""


class Lease:
    """One named Lease and this process's claim on it.

    All requests are made in a thread of its own. In the main event loop a renewal takes some twenty turns, each of
    which may take a second when other processes need the CPU: a busy machine made the operator lose the Lease.
    """

    def __init__(self, thread: LoopThread, api: KubernetesApi, namespace: str, name: str, identity: str) -> None:
        """api: a client that only `thread` uses."""
        self._thread = thread
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._seen: tuple[str, str] = ("", "")  # holder, renew time
        self._seen_at = 0.0
        self._version = 0
        """Newest resource version of the Lease that was read or written."""
        self.is_held = False
        """True from acquiring the Lease until giving it up. One failed renewal does not change it."""

    async def acquire(self) -> None:
        """Wait until this process holds the Lease."""
        await self._thread.run(self._acquire())

    async def renew(self) -> None:
        """Renew the Lease until it is lost, or until renewals fail for too long. Then the caller must stop at once."""
        await self._thread.run(self._renew())

    async def release(self) -> None:
        """Release the Lease, so that the next operator need not wait until it expires."""
        await self._thread.run(self._release())

    async def _acquire(self) -> None:
        waiting = False
        while (claim := await self._try()) is not Claim.RENEWED:
            if claim is Claim.CREATED:
                await asyncio.sleep(SETTLE_S)
                continue
            if not waiting:
                logger.info("Standing by: %s holds the Lease %s/%s", self._seen[0], self._namespace, self._name)
                waiting = True
            await asyncio.sleep(RETRY_EVERY_S)
        self._note(is_held=True)
        logger.info("Holding the Lease %s/%s as %s", self._namespace, self._name, self._identity)

    async def _renew(self) -> None:
        clock = asyncio.get_running_loop().time
        renewed_at, renewed = clock(), True
        while clock() - renewed_at < GIVE_UP_AFTER_S:
            await asyncio.sleep(RENEW_EVERY_S if renewed else RETRY_EVERY_S)
            started_at = clock()
            try:
                async with asyncio.timeout(GIVE_UP_AFTER_S - (started_at - renewed_at)):
                    claim = await self._try()
            except TimeoutError:
                break
            if claim is Claim.LOST:
                break
            renewed = claim is not Claim.FAILED
            renewed_at = started_at if renewed else renewed_at
        self._note(is_held=False)

    async def _release(self) -> None:
        if not self.is_held:
            return
        self._note(is_held=False)
        try:
            current = await self._api.get(LEASE, self._namespace, self._name)  # a renewal may have changed it meanwhile
            if current is not None and current["spec"].get("holderIdentity") == self._identity:
                current["spec"]["holderIdentity"] = ""
                await self._api.replace(current)
        except (ApiError, *UNREACHABLE) as error:
            logger.info("Could not release the Lease; it runs out in %d s: %s", DURATION_S, error)

    def _note(self, *, is_held: bool) -> None:
        self.is_held = is_held
        telemetry.LEADING.set(is_held)

    async def _try(self) -> Claim:
        """Take or renew the Lease, if it is free or this process holds it."""
        try:
            current = await self._api.get(LEASE, self._namespace, self._name)
            if current is None:
                self._note_version(await self._api.create(self._claim(None)))
                return Claim.CREATED
            if not self._note_version(current):
                logger.warning("The cluster was restored from a backup: this operator forgets what it knew of it")
                return Claim.LOST
            if not self._free(current):
                return Claim.LOST
            self._note_version(await self._api.replace(self._claim(current)))
        except (ApiError, *UNREACHABLE) as error:
            logger.warning("Cannot read or renew the Lease %s/%s: %r", self._namespace, self._name, error)
            return Claim.FAILED
        return Claim.RENEWED

    def _note_version(self, document: Object) -> bool:
        """Record the version. False if it is lower than before, which only a restored backup explains."""
        before, self._version = self._version, version_of(document)
        return self._version >= before

    def _free(self, current: Object) -> bool:
        """True if this process holds the Lease, if it was released, or if it expired while this process watched it."""
        spec = current.get("spec") or {}
        record = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        at = asyncio.get_running_loop().time()
        if record != self._seen:
            self._seen, self._seen_at = record, at
        expired = at - self._seen_at > (spec.get("leaseDurationSeconds") or DURATION_S)
        return record[0] in ("", self._identity) or expired

    def _claim(self, current: Object | None) -> Object:
        timestamp = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = dict((current or {}).get("spec") or {})
        if spec.get("holderIdentity") != self._identity:
            spec["acquireTime"] = timestamp
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + (current is not None)
        spec.update(holderIdentity=self._identity, leaseDurationSeconds=DURATION_S, renewTime=timestamp)
        metadata = (current or {}).get("metadata") or {"name": self._name, "namespace": self._namespace}
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}
