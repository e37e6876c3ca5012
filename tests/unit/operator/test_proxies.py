"""The operator in a cluster whose environment names a proxy: what lies in the cluster is reached directly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client.configuration import Configuration
from outrider_crds.runtime_state import RuntimeState
from outrider_operator.cluster.cache import Key
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.kinds import POD
from outrider_operator.service_metrics.pod_polls import StateEndpoint
from outrider_operator.service_metrics.prometheus import Connection, PrometheusFigures, is_internal

from tests.unit.operator.validation.test_states import STATE


class Proxy:
    """A proxy that refuses requests and records them."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append((await reader.readline()).decode())
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


@asynccontextmanager
async def refusing_proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """A proxy for everything but the cluster's networks, as an administrator writes it."""
    proxy = Proxy()
    server = await asyncio.start_server(proxy.refuse, "127.0.0.1", 0)
    address = "http://{}:{}".format(*server.sockets[0].getsockname())
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, address)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "10.0.0.0/8,127.0.0.0/8,.svc")
    async with server:
        yield proxy


def serving(document: object) -> TestServer:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(document)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    return TestServer(application)


async def test_api_server_behind_no_proxy_cidr_is_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator never reached an API server at 10.99.0.1 with HTTPS_PROXY and NO_PROXY=10.0.0.0/8."""
    async with refusing_proxy(monkeypatch) as proxy, serving({"kind": "Pod"}) as server:
        api = KubernetesApi(Configuration(host=str(server.make_url("")).rstrip("/")))
        pod_seen = await api.get(POD, "a", "b")
        await api.close()
    assert (pod_seen, proxy.requests) == ({"kind": "Pod"}, [])


async def test_api_server_with_kubeconfig_proxy_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """proxy-url of a kubeconfig is meant for the API server alone."""
    async with refusing_proxy(monkeypatch) as proxy, serving({}) as server:
        named = asyncio.start_server(proxy.refuse, "127.0.0.1", 0)
        async with await named as own:
            configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
            configuration.proxy = "http://{}:{}".format(*own.sockets[0].getsockname())
            api = KubernetesApi(configuration)
            with pytest.raises(Exception, match="403"):
                await api.get(POD, "a", "b")
            await api.close()
    assert len(proxy.requests) == 1


async def test_pod_state_behind_no_proxy_cidr_is_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods have addresses, which no administrator lists."""
    async with refusing_proxy(monkeypatch) as proxy, serving(STATE) as server:
        assert server.port is not None
        endpoint = StateEndpoint()
        state = await endpoint.ask(str(server.make_url("/outrider/state")))
        await endpoint.close()
    assert isinstance(state, RuntimeState)
    assert proxy.requests == []


async def test_prometheus_in_the_cluster_is_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Service's short name, prometheus.monitoring, is on no NO_PROXY list."""
    nothing = {"status": "success", "data": {"resultType": "vector", "result": []}}
    async with refusing_proxy(monkeypatch) as proxy, serving(nothing) as server:
        figures = PrometheusFigures(Connection(url=f"http://localhost:{server.port}"), 60)
        await figures.ask()
    assert "has no outrider_* metrics" in figures.figures(Key("a", "b")).error
    assert proxy.requests == []


async def test_prometheus_outside_the_cluster_uses_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A managed one may be reached no other way; its name need not be known in the cluster."""
    async with refusing_proxy(monkeypatch) as proxy:
        figures = PrometheusFigures(Connection(url="http://prometheus.example.invalid"), 60)
        await figures.ask()
    assert "does not answer" in figures.figures(Key("a", "b")).error
    assert proxy.requests[0].startswith("GET http://prometheus.example.invalid/")


@pytest.mark.parametrize(
    ("url", "internal"),
    [
        ("http://10.99.0.1:9090", True), ("http://[fd00::1]:9090", True), ("http://127.0.0.1", True),
        ("https://100.64.3.2", True), ("https://8.8.8.8", False), ("https://[2606:4700::1111]", False),
        ("http://nowhere.invalid", False), ("http://", False),
    ],
)  # fmt: skip
def test_is_internal_knows_private_networks(url: str, internal: bool) -> None:
    """Clusters take theirs from the private ranges, and from those of carriers (100.64/10)."""
    assert is_internal(url) is internal
