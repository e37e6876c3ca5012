"""What a scrape of the operator costs it."""

from __future__ import annotations

import asyncio
import threading

import aiohttp
from outrider_operator.http_page import MetricsPage, serving_metrics

from tests.ports import free_port


async def test_many_scrapes_at_once_render_one_page() -> None:
    """Sixty clients in a loop left the event loop one turn in thirteen."""
    made: list[int] = []

    def make() -> bytes:
        made.append(threading.get_ident())
        return b"page"

    page = MetricsPage(make)
    assert set(await asyncio.gather(*(page.text() for _ in range(60)))) == {b"page"}
    assert len(made) == 1
    assert made[0] != threading.get_ident(), "made on the event loop"


async def test_idle_connections_hold_no_thread_and_block_no_scrape() -> None:
    port = free_port()
    async with serving_metrics(port):
        before = threading.active_count()
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert "process_max_fds" in await answer.text()
        assert threading.active_count() <= before + 1  # the one that made the page
        for _, writer in idle:
            writer.close()
