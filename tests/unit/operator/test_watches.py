"""A watch that fails: how often it comes back, and what it asks of the API server then. Over real connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.test_utils import TestServer
from kubernetes.aio.client.configuration import Configuration
from outrider_operator.cluster.cache import ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.configuration import OperatorSettings
from outrider_operator.controller.supervision import Backoff
from outrider_operator.controller.watches import CHILD_SELECTOR, Watch, Watches
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT, ResourceKind
from outrider_operator.operator_metrics import telemetry

from tests.unit.operator.documents import document

Event = dict[str, Any]


class ApiServer:
    """Lists what `objects` holds; each watch sends the events of the next of `streams`, then ends as that says."""

    def __init__(self, streams: list[list[Event] | int]) -> None:
        self.objects = [document("chat", 5)]
        self.lists = 0
        self.accepted: list[str] = []
        self.page_sizes: list[int] = []
        self.watched_from: list[str] = []
        self._streams: Iterator[list[Event] | int] = iter(streams)
        self.done = asyncio.Event()
        self.over = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.accepted.append(request.headers["Accept"])
        if "watch" not in request.query:
            return self._page(int(request.query["limit"]), int(request.query.get("continue") or 0))
        self.watched_from.append(request.query["resourceVersion"])
        stream = next(self._streams, None)
        if stream is None:
            self.done.set()
            await self.over.wait()
        if isinstance(stream, int):
            return web.json_response({"reason": "InternalError", "message": "no"}, status=stream)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in stream or ():
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    def _page(self, size: int, first: int) -> web.Response:
        self.lists += first == 0
        self.page_sizes.append(size)
        more = {"continue": str(first + size)} if first + size < len(self.objects) else {}
        items = self.objects[first : first + size]
        return web.json_response({"metadata": {"resourceVersion": "7", **more}, "items": items})


class CountedBackoff(Backoff):
    """No pauses, but their history."""

    def __init__(self) -> None:
        super().__init__(1.0, 8.0, lambda: 0.0)
        self.pauses: list[float] = []

    def next_s(self) -> float:
        self.pauses.append(super().next_s())
        return 0.0


async def test_a_watch_that_always_fails_pauses_longer_each_time() -> None:
    """Each successful list reset the pause: it listed everything every half second."""
    backoff = await _run(ApiServer([500, 500, 500, 500]))
    assert backoff.pauses == [1.0, 2.0, 4.0, 8.0]


async def test_events_reset_the_pause() -> None:
    backoff = await _run(ApiServer([500, 500, [_event("MODIFIED", 8)], 500]))
    assert backoff.pauses == [1.0, 2.0, 1.0, 2.0]


async def test_a_stream_that_ends_goes_on_where_it_was() -> None:
    """No list of everything for it; a bookmark moves the place too."""
    server = ApiServer([[_event("MODIFIED", 8)], [_event("BOOKMARK", 11)], []])
    await _run(server)
    assert server.lists == 1
    assert server.watched_from == ["7", "8", "11", "11"]


@pytest.mark.parametrize(
    "stream",
    [[{"type": "ERROR", "object": {"code": code}}] for code in (410, 500)] + [[{"what": "ever"}], 403, 504],
    ids=str,
)
async def test_where_changes_may_be_lost_it_lists_again(stream: list[Event] | int) -> None:
    server = ApiServer([stream])
    cache = ObjectCache()
    cache.seen(DEPLOYMENT, document("unseen", 3, uid="unseen"))
    await _run(server, cache)
    assert server.lists == 2
    assert [child["metadata"]["name"] for child in cache.all(DEPLOYMENT)] == ["chat"]


@pytest.mark.parametrize("status", [403, 404])
async def test_a_namespace_that_is_gone_stops_no_other(status: int) -> None:
    """Its Role goes with it: the operator waited for ever for what it may not list, and reconciled no service."""

    async def answer(request: web.Request) -> web.Response:
        if "/namespaces/gone/" in request.path:
            return web.json_response({"reason": "Forbidden", "message": "no"}, status=status)
        if "watch" in request.query:
            await asyncio.sleep(60)
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": []})

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    async with TestServer(application) as server:
        api = KubernetesApi(Configuration(host=str(server.make_url("")).rstrip("/")))
        watches = Watches(api, ObjectCache(), OperatorSettings(watch_namespaces=("a", "gone"), watch_nodes=False))
        loops = [asyncio.ensure_future(run()) for run in watches.tasks().values()]
        await asyncio.wait_for(watches.listed(), 50)
        assert watches.knows("a")
        assert not watches.knows("gone")
        assert {name.partition(" in ")[2] for name in watches.unlisted()} == {"gone"}
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
        await api.close()


@pytest.mark.parametrize(
    ("namespaces", "trusted", "further"),
    [(("a",), ("a",), {"configmaps in system"}), (("a", "system"), ("a",), set[str]()), (("a",), (), set[str]())],
)
def test_shared_profiles_are_watched_where_nothing_else_is(
    namespaces: tuple[str, ...], trusted: tuple[str, ...], further: set[str]
) -> None:
    """The operator's own namespace is usually none of watchNamespaces."""
    plain = OperatorSettings(namespace="system", watch_namespaces=namespaces)
    sharing = plain.model_copy(update={"profiling_shared_from": trusted})
    before, after = (Watches(KubernetesApi(Configuration()), ObjectCache(), it).tasks() for it in (plain, sharing))
    assert set(after) - set(before) == {f"watch of {name}" for name in further}


async def test_config_maps_are_watched_by_their_metadata() -> None:
    """Anyone may fill one with a megabyte: 600 of them took 148 MB, and a page of 25 was in memory as a whole."""
    server = ApiServer([[]])
    await _run(server, kind=CONFIG_MAP)
    kinds = [accepted.split(";")[1] for accepted in server.accepted]
    assert kinds[:2] == ["as=PartialObjectMetadataList", "as=PartialObjectMetadata"]


async def test_large_objects_are_listed_in_smaller_pages() -> None:
    """A page that is too large is read only up to the limit."""
    server, cache = ApiServer([]), ObjectCache()
    large = [
        document(f"large-{number}", 5, uid=f"large-{number}", spec={"x": "x" * 1024 * 1024}) for number in range(6)
    ]
    small = [document(f"small-{number}", 5, uid=f"small-{number}") for number in range(40)]
    server.objects = [*large, *small]
    await _run(server, cache)
    assert {child["metadata"]["name"] for child in cache.all(DEPLOYMENT)} == {
        child["metadata"]["name"] for child in small
    }
    assert server.page_sizes == [25, 5, 1, 5, 1, 5, 1, 5, 25, 25]


async def test_an_event_that_is_too_large_ends_no_watch() -> None:
    """700 KiB of one tenant's `<` take 4.2 MB on the wire. The watch met that line again and again, for ever."""
    huge = {"type": "ADDED", "object": document("huge", 8, uid="huge", data={"x": "\x01" * 700 * 1024})}
    after = {"type": "ADDED", "object": document("after", 9, uid="after")}
    server, cache = ApiServer([[huge, after]]), ObjectCache()
    before = _too_large()
    await _run(server, cache)
    assert _too_large() == before + 1
    assert {child["metadata"]["name"] for child in cache.all(DEPLOYMENT)} >= {"after"}


async def test_what_an_event_too_large_had_to_say_comes_with_a_list() -> None:
    """It may have been a deletion. One list, once the stream has ended: users cannot force lists at will."""
    huge = {"type": "DELETED", "object": document("chat", 8, data={"x": "\x01" * 700 * 1024})}
    server = ApiServer([[huge, huge, _event("BOOKMARK", 9)], []])
    await _run(server)
    assert server.lists == 2
    assert server.watched_from == ["7", "7", "7"]


@pytest.mark.parametrize("error", [LineTooLong(b"x", 1), RecursionError(), TypeError()], ids=repr)
async def test_whatever_ends_a_stream_does_not_end_the_watch(error: Exception, monkeypatch) -> None:
    """It lists again, pauses longer each time, and does not come back to the place where it failed."""
    cache, answers = ObjectCache(), iter([error, error])

    def refuse(*_: Any) -> None:
        raise next(answers)

    monkeypatch.setattr(cache, "left", refuse)
    server = ApiServer([[_event("DELETED", 8)], [_event("DELETED", 8)]])
    backoff = await _run(server, cache)
    assert server.lists == 3
    assert backoff.pauses == [1.0, 2.0]


async def _run(server: ApiServer, cache: ObjectCache | None = None, kind: ResourceKind = DEPLOYMENT) -> CountedBackoff:
    backoff = CountedBackoff()
    async with _serving(server) as api:
        watch = Watch(api, cache or ObjectCache(), kind, None, CHILD_SELECTOR, backoff=backoff)
        running = asyncio.create_task(watch.run())
        await asyncio.wait_for(server.done.wait(), 60)
        running.cancel()
        await asyncio.wait([running])
        server.over.set()
    return backoff


@asynccontextmanager
async def _serving(server: ApiServer) -> AsyncIterator[KubernetesApi]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    api = KubernetesApi(configuration)
    try:
        yield api
    finally:
        await api.close()
        await runner.cleanup()


def _too_large() -> float:
    return float(telemetry.UNFIT.labels(source="object", reason="TooLarge")._value.get())


def _event(kind: str, version: int) -> Event:
    return {"type": kind, "object": document("chat", version)}
