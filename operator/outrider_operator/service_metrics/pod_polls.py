"""Poll the state endpoint of every ready serving pod. A tenant's process answers: it may send anything."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
from outrider_crds.prefetch_report import PREFETCH_PATH, PrefetchProgress
from outrider_crds.runtime_state import RuntimeState

from outrider_operator.cluster.cache import Key
from outrider_operator.cluster.serving_pods import ServingPod, ServingPods, pod_url
from outrider_operator.operator_metrics import telemetry
from outrider_operator.validation.reading import InvalidInput, cut
from outrider_operator.validation.reports import MOST_BYTES, prefetch_progress, refusal, runtime_state

TIMEOUT_S = 2.0
"""Timeout of the whole answer."""
CONNECTIONS = 512
"""Concurrent connections. A namespace may use only a few of them (`AT_ONCE`)."""
_SOURCE = "state"
logger = logging.getLogger(__name__)
TICK_S = 0.5
URGENT_EVERY_S = 1.0
IDLE_EVERY_S = 15.0
LATELY_S = 3 * IDLE_EVERY_S
AT_ONCE = 8
"""Concurrent polls per namespace, so that slow pods delay only polls of their own namespace."""
FIRST_ROUND_S = 5.0


class StateEndpoint:
    """Polls the states of pods over one HTTP session."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, url: str) -> RuntimeState | InvalidInput:
        body = await self._get(url)
        return body if isinstance(body, InvalidInput) else runtime_state(body)

    async def prefetch(self, address: str) -> PrefetchProgress | None:
        """What the pod of a prefetch Job reports; None without an answer that can be read."""
        body = await self._get(pod_url(address, PREFETCH_PATH))
        return None if isinstance(body, InvalidInput) else prefetch_progress(body)

    async def _get(self, url: str) -> bytes | InvalidInput:
        try:
            # A redirect would let the pod choose an address that the operator requests. A pod's own certificate names
            # no authority: what it answers is not trusted anyway.
            async with self._open().get(url, allow_redirects=False, ssl=False) as response:
                body = await _read(response.content)
                if response.status != 200:
                    return InvalidInput(_SOURCE, "NoAnswer", refusal(response.status, body))
                return body
        except TimeoutError:
            return InvalidInput(_SOURCE, "TooSlow", f"no whole answer within {self._timeout.total} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return InvalidInput(_SOURCE, "NoAnswer", _message(error))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=5),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,  # a small body may unpack to gigabytes
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _message(error: Exception) -> str:
    """A sentence for a condition, without names of classes or details of the connection."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionError):
        return "the connection was cut"
    return f"no answer in HTTP ({cut(str(error) or type(error).__name__)})"


async def _read(content: aiohttp.StreamReader) -> bytes:
    """Read to the end, or one byte beyond the limit. A single read may return only a part."""
    body = b""
    while len(body) <= MOST_BYTES and (part := await content.read(MOST_BYTES + 1 - len(body))):
        body += part
    return body


_Endpoint = tuple[str, str]
"""(uid of a pod, URL of its state). Services that select one pod may name different ports of it."""


@dataclass
class _Poll:
    """Polls of one endpoint."""

    services: set[Key] = field(default_factory=set)
    """Services that the pod has at this URL: its news wakes all of them."""
    state: RuntimeState | None = None
    answered_at: float = float("-inf")
    polled_at: float = float("-inf")
    under_way: bool = False
    unreachable: str = ""
    """Error of the last poll; empty if it succeeded."""
    busy: bool = True
    """True if tokens were generated between the last two answers, or before the second one."""

    def note(self, state: RuntimeState) -> None:
        """Note an answer."""
        self.busy = self.state is None or self.state.output_tokens != state.output_tokens
        self.state, self.answered_at, self.unreachable = state, asyncio.get_running_loop().time(), ""


class PodStates:
    """The newest state of every ready serving pod.

    A pod is polled every few seconds while it has traffic, rarely while it is idle, and often while its service waits
    for news that only the pod has, such as a new config in force. A pod that did not answer properly is always polled
    rarely: its answer may be expensive to read.
    """

    def __init__(
        self, pods: ServingPods, endpoint: StateEndpoint, changed: Callable[[Key], None], busy_every_s: float
    ) -> None:
        self._pods = pods
        self._endpoint = endpoint
        self._changed = changed
        self._busy_every_s = busy_every_s
        self._polls: dict[_Endpoint, _Poll] = {}
        self._urgent: set[Key] = set()
        self._limits: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))

    def states(self, key: Key) -> dict[str, RuntimeState]:
        """Pod name -> newest state, for pods that answered recently."""
        at = asyncio.get_running_loop().time()
        return {
            name: poll.state
            for name, poll in self._polls_of(key)
            if poll.state is not None and at - poll.answered_at < LATELY_S
        }

    def unreachable(self, key: Key) -> dict[str, str]:
        """Pod name -> error of the last poll, for ready pods that did not answer it."""
        return {name: poll.unreachable for name, poll in self._polls_of(key) if poll.unreachable}

    def ready(self, key: Key) -> int:
        """Number of the service's ready pods."""
        return sum(_can_be_polled(pod) for pod in self._pods.of(key))

    def set_urgent(self, key: Key, urgent: bool) -> None:
        (self._urgent.add if urgent else self._urgent.discard)(key)

    async def run(self) -> None:
        """Poll until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._poll_due(group)
                    await asyncio.sleep(TICK_S)
        finally:
            await self._endpoint.close()

    async def first_round(self) -> None:
        """Return once `run` has polled every pod that is ready now, or after some seconds, since a pod may never
        answer."""
        endpoints = [_endpoint(pod) async for _, pod in self._pollable()]
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ROUND_S):
                while any((poll := self._polls.get(it)) is None or poll.under_way for it in endpoints):
                    await asyncio.sleep(TICK_S)

    async def _poll_due(self, group: asyncio.TaskGroup) -> None:
        at, services = asyncio.get_running_loop().time(), defaultdict[_Endpoint, set[Key]](set)
        async for key, pod in self._pollable():
            services[_endpoint(pod)].add(key)
            poll = self._polls.get(_endpoint(pod)) or _Poll()
            poll.services.add(key)
            if not poll.under_way and at - poll.polled_at >= self._interval_s(key, poll):
                group.create_task(self._ask(poll, pod))
        for endpoint in self._polls.keys() - services.keys():
            del self._polls[endpoint]
        for endpoint, poll in self._polls.items():
            poll.services = services[endpoint]

    def _polls_of(self, key: Key) -> Iterator[tuple[str, _Poll]]:
        """(pod name, polls of it) for the ready pods of the service that were polled."""
        for pod in self._pods.of(key):
            if _can_be_polled(pod) and (poll := self._polls.get(_endpoint(pod))) is not None:
                yield pod.name, poll

    async def _pollable(self) -> AsyncIterator[tuple[Key, ServingPod]]:
        """All ready pods. Each service takes one turn of the event loop, which must not wait for thousands of pods."""
        for key in self._pods.services():
            for pod in self._pods.of(key):
                if _can_be_polled(pod):
                    yield key, pod
            await asyncio.sleep(0)

    def _interval_s(self, key: Key, poll: _Poll) -> float:
        if poll.unreachable:
            return IDLE_EVERY_S
        if key in self._urgent:
            return URGENT_EVERY_S
        return self._busy_every_s if poll.busy else IDLE_EVERY_S

    async def _ask(self, poll: _Poll, pod: ServingPod) -> None:
        self._polls[_endpoint(pod)] = poll
        poll.polled_at, poll.under_way = asyncio.get_running_loop().time(), True
        try:
            async with self._limits[pod.namespace]:
                answer = await self._endpoint.ask(pod.state_url)
        finally:
            poll.under_way = False
        before = _news(poll)
        if isinstance(answer, InvalidInput):
            telemetry.POLLS.labels(outcome="failed").inc()
            telemetry.count_invalid(answer)
            logger.debug("No state from pod %s/%s: %s", pod.namespace, pod.name, answer.detail)
            poll.unreachable = answer.detail or answer.reason
        else:
            telemetry.POLLS.labels(outcome="answered").inc()
            poll.note(answer)
        if _news(poll) != before:
            for key in poll.services:
                self._changed(key)


def _can_be_polled(pod: ServingPod) -> bool:
    return pod.ready and bool(pod.state_url)


def _endpoint(pod: ServingPod) -> _Endpoint:
    return pod.uid, pod.state_url


def _news(poll: _Poll) -> object:
    """What conditions quote: a change wakes the services at once, so once per poll at most. Figures wait for the next
    snapshot."""
    state = poll.state
    if state is None:
        return poll.unreachable
    drafters = tuple((drafter.name, drafter.loaded, drafter.reason) for drafter in state.drafters)
    adapters = tuple((adapter.name, adapter.loaded, adapter.reason) for adapter in state.adapters)
    profile = (state.profile.source, state.profile.mismatch, state.profile.load_error)
    return (
        poll.unreachable,
        state.started_at,
        state.config_hash,
        state.config_error,
        state.file_digest,
        state.restart_reason,
        state.plugin_active,
        state.ready,
        state.choice.reason,
        drafters,
        adapters,
        profile,
    )
