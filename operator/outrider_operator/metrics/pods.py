"""Polls the state endpoint of every ready serving pod."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from outrider_crds.runtime_config import ADMIN_PORT, STATE_PATH
from outrider_crds.state import RuntimeState
from pydantic import ValidationError

from outrider_operator import kinds, telemetry
from outrider_operator.cache import Cache
from outrider_operator.kinds import component, labels_of, name_of, namespace_of
from outrider_operator.model import SERVICE_LABEL, SERVING, Object
from outrider_operator.work_queue import Key

logger = logging.getLogger(__name__)

TICK_S = 0.5
URGENT_EVERY_S = 1.0
IDLE_EVERY_S = 15.0
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
CONCURRENCY = 32
LATELY_S = 3 * IDLE_EVERY_S
MOST_BYTES = 1 << 20


@dataclass
class _Pod:
    """What is known of one serving pod."""

    key: Key
    name: str
    address: str
    state: RuntimeState | None = None
    answered_at: float = float("-inf")
    polled_at: float = float("-inf")
    polling: bool = False
    busy: bool = True
    """Tokens flowed between the last two answers (or there were none yet)."""


class PodStates:
    """The newest state of every ready serving pod in the cache.

    A pod is asked every few seconds while it has traffic, seldom while it is idle, and often while its service
    waits for something that only the pod can tell (that a new configuration is in force).
    """

    def __init__(self, cache: Cache, changed: Callable[[Key], None], busy_every_s: float) -> None:
        self._cache = cache
        self._changed = changed
        self._busy_every_s = busy_every_s
        self._pods: dict[str, _Pod] = {}  # by uid
        self._urgent: set[Key] = set()
        self._limit = asyncio.Semaphore(CONCURRENCY)

    def states(self, key: Key) -> dict[str, RuntimeState]:
        """Pod name -> newest state, of pods that answered lately."""
        now = asyncio.get_running_loop().time()
        return {
            pod.name: pod.state
            for pod in self._pods.values()
            if pod.key == key and pod.state is not None and now - pod.answered_at < LATELY_S
        }

    def ready(self) -> dict[Key, set[str]]:
        """Service -> names of its ready pods."""
        ready: dict[Key, set[str]] = {}
        for pod in self._pods.values():
            ready.setdefault(pod.key, set()).add(pod.name)
        return ready

    def existing(self) -> dict[Key, set[str]]:
        """Service -> names of its serving pods, ready or not."""
        existing: dict[Key, set[str]] = {}
        for pod in self._cache.all(kinds.POD):
            if component(pod) == SERVING:
                key = Key(namespace_of(pod), labels_of(pod)[SERVICE_LABEL])
                existing.setdefault(key, set()).add(name_of(pod))
        return existing

    def set_urgent(self, key: Key, urgent: bool) -> None:
        (self._urgent.add if urgent else self._urgent.discard)(key)

    async def run(self) -> None:
        """Poll until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                now = asyncio.get_running_loop().time()
                self._follow_cache()
                for pod in self._pods.values():
                    if not pod.polling and now - pod.polled_at >= self._interval_s(pod):
                        group.create_task(self._poll(pod))
                await asyncio.sleep(TICK_S)

    async def ask_all(self) -> None:
        """Poll every ready pod once, now."""
        self._follow_cache()
        await asyncio.gather(*(self._poll(pod) for pod in self._pods.values()))

    def _interval_s(self, pod: _Pod) -> float:
        if pod.key in self._urgent:
            return URGENT_EVERY_S
        return self._busy_every_s if pod.busy else IDLE_EVERY_S

    def _follow_cache(self) -> None:
        """Poll the pods that are ready now, and no others."""
        ready = {pod["metadata"]["uid"]: pod for pod in self._cache.all(kinds.POD) if _serves(pod)}
        for uid, document in ready.items():
            address = document["status"]["podIP"]
            if uid not in self._pods:
                key = Key(namespace_of(document), labels_of(document)[SERVICE_LABEL])
                self._pods[uid] = _Pod(key, name_of(document), address)
            self._pods[uid].address = address
        for uid in self._pods.keys() - ready.keys():
            del self._pods[uid]

    async def _poll(self, pod: _Pod) -> None:
        pod.polled_at, pod.polling = asyncio.get_running_loop().time(), True
        try:
            async with self._limit, aiohttp.ClientSession(timeout=_TIMEOUT) as session:
                state = await _read(session, pod.address)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            telemetry.POLLS.labels(outcome="failed").inc()
            logger.debug("No state from pod %s/%s: %r", pod.key.namespace, pod.name, error)
        else:
            telemetry.POLLS.labels(outcome="answered").inc()
            self._note(pod, state)
        finally:
            pod.polling = False

    def _note(self, pod: _Pod, state: RuntimeState) -> None:
        before = pod.state
        pod.state, pod.answered_at = state, asyncio.get_running_loop().time()
        pod.busy = before is None or before.output_tokens != state.output_tokens
        if before is None or _news(before) != _news(state):
            self._changed(pod.key)


async def _read(session: aiohttp.ClientSession, address: str) -> RuntimeState:
    """Raises ValueError for an answer that is no state, besides what the transport raises."""
    host = f"[{address}]" if ":" in address else address
    async with session.get(f"http://{host}:{ADMIN_PORT}{STATE_PATH}") as response:
        response.raise_for_status()
        body = await response.content.read(MOST_BYTES)
    try:
        return RuntimeState.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(f"not a state: {error.errors()[0]}") from None


def _serves(pod: Object) -> bool:
    if component(pod) != SERVING or not pod.get("status", {}).get("podIP"):
        return False
    conditions = pod["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _news(state: RuntimeState) -> object:
    """What a decision should hear of at once; figures wait for the next regular look."""
    drafters = tuple((drafter.name, drafter.loaded, drafter.reason) for drafter in state.drafters)
    profile = (state.profile.source, state.profile.mismatch, state.profile.load_error)
    return (
        state.started_at,
        state.config_hash,
        state.config_error,
        state.ready,
        state.choice.reason,
        drafters,
        profile,
    )
