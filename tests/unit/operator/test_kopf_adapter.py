"""The operator as a process runs it, against an API server that has its bad moments."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import BaseTestServer, TestServer
from kubernetes.aio.client.configuration import Configuration as ClientConfiguration
from outrider_operator import lease, main
from outrider_operator.configuration import OperatorSettings
from outrider_operator.kinds import SERVICE

from tests.ports import free_port
from tests.unit.operator.decide.world import manifest

_LATE = {"name": "late", "namespace": "a", "uid": "late", "resourceVersion": "5", "generation": 1}


class ApiServer:
    """Namespace `a` works, but its first watch of the services ends in an error; `gone` was deleted with its Role."""

    def __init__(self) -> None:
        self.status_written = asyncio.Event()
        self.over = asyncio.Event()
        self._watched = 0
        self._lease: dict[str, Any] = {}
        self._version = 10

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/")
        if "/namespaces/gone/" in path:
            return web.json_response({"reason": "Forbidden", "message": "no"}, status=403)
        if request.method != "GET":
            return await self._write(request)
        if "watch" in request.query:
            return await self._watch(request, path.endswith(f"/a/{SERVICE.plural}"))
        if "/namespaces/" not in path:
            return web.json_response(_discovery(path))
        if path.endswith("/leases/outrider-operator"):
            missing = {"reason": "NotFound", "message": "none"}
            return web.json_response(self._lease or missing, status=200 if self._lease else 404)
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    async def _write(self, request: web.Request) -> web.Response:
        document = await request.json()
        self._version += 1
        document["metadata"] |= {"uid": f"uid-{self._version}", "resourceVersion": str(self._version)}
        if "/leases" in request.path:
            self._lease = document
        if request.path.endswith("/late/status"):
            self.status_written.set()
        return web.json_response(document)

    async def _watch(self, request: web.Request, of_services: bool) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if of_services:
            self._watched += 1
            late = {"type": "ADDED", "object": {**manifest(), "metadata": _LATE}}
            error = {"type": "ERROR", "object": {"code": 500, "message": "etcd event channel closed"}}
            await response.write(json.dumps(error if self._watched == 1 else late).encode() + b"\n")
            if self._watched == 1:
                return response
        await self.over.wait()
        return response


@pytest.mark.slow
async def test_no_error_of_a_watch_ends_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator ended for all services when etcd lost its leader, and when one namespace lost its Role."""
    api_server = ApiServer()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", api_server.answer)
    async with TestServer(application) as server:
        running = asyncio.create_task(_operator(server, monkeypatch))
        written = asyncio.create_task(api_server.status_written.wait())
        await asyncio.wait([running, written], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        outcome = running.done(), written.done()
        api_server.over.set()
        running.cancel()
        written.cancel()
        await asyncio.wait([running, written])
    assert outcome == (False, True)


async def _operator(server: BaseTestServer, monkeypatch: pytest.MonkeyPatch) -> bool:
    async def load_configuration() -> ClientConfiguration:
        return ClientConfiguration(host=str(server.make_url("")).rstrip("/"))

    monkeypatch.setattr(main, "load_configuration", load_configuration)
    monkeypatch.setattr(lease, "SETTLE_S", 0.0)
    settings = OperatorSettings(
        namespace="a",
        pod_name="operator",
        watch_namespaces=("a", "gone"),
        watch_nodes=False,
        health_port=free_port(),
        metrics_port=free_port(),
    )
    return await main._run(settings)


def _discovery(path: str) -> dict[str, Any]:
    version = {"groupVersion": SERVICE.api_version, "version": SERVICE.version}
    group = {"name": SERVICE.group, "versions": [version], "preferredVersion": version}
    names = {"/api/v1": ("namespaces", "Namespace"), f"/apis/{SERVICE.api_version}": (SERVICE.plural, SERVICE.kind)}
    if path in names:
        plural, kind = names[path]
        verbs = ["get", "list", "watch", "patch"]
        resource = {"name": plural, "kind": kind, "singularName": plural, "namespaced": True, "verbs": verbs}
        return {"kind": "APIResourceList", "groupVersion": SERVICE.api_version, "resources": [resource]}
    return {"kind": "APIGroupList", "versions": ["v1"], "groups": [group], "resources": []}
