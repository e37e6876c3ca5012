"""The operator's pages, for kubelet and scrapes."""

from __future__ import annotations

import socket

import aiohttp
import pytest
from outrider_operator import http_page

from tests.ports import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_probes_are_answered_over_either_address_family(host: str) -> None:
    """Probes were refused on a cluster of IPv6 alone, and the operator restarted once a minute."""
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = free_port()
    async with (
        http_page.serving_health(port, lambda: {"leading": True}, lambda: False),
        aiohttp.ClientSession() as session,
        session.get(f"http://{host}:{port}/healthz") as answer,
    ):
        assert answer.status == 200
        assert await answer.json() == {"operator": {"leading": True}}


async def test_a_probe_fails_while_a_reconcile_is_stuck() -> None:
    """The page said 200 whatever had happened, so the kubelet never restarted an operator that stood still."""
    port = free_port()
    async with (
        http_page.serving_health(port, lambda: {}, lambda: True),
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/healthz") as answer,
    ):
        assert answer.status == 503
