"""Sends requests that come at times of their own, and times them, by the machine's clock.

Where requests come as fast as they do by the wall clock, a spell in which the machine is slow fills the queues, and no
average can take that out again. By a clock that goes slower in such a spell every system gets the load that it would
get on a machine that is always at its usual speed. vLLM's generator knows the wall clock alone.

A request of an SLO class is timed by the wall clock all the same: that is what its class promises, and what a server
can see to.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from tests.benchmarks.evidence.load import Outcome, Sent
from tests.benchmarks.evidence.plan import Planned, Point
from tests.benchmarks.evidence.speedometer import PERIOD_S, MachineClock

DATA = b"data: {"
"""Begins a line of the stream that holds more than its end."""


def send_timed(point: Point, clock: MachineClock, base_url: str, model: str, output_tokens: int) -> Sent:
    """Runs the point to its last answer. A request that failed is an outcome with an error."""
    return asyncio.run(_send_all(point, clock, f"{base_url}/v1/chat/completions", model, output_tokens))


async def _send_all(point: Point, clock: MachineClock, url: str, model: str, output_tokens: int) -> Sent:
    # A connection each: the server closes one that has waited for a while, and a POST that meets it there has failed.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        ticking = asyncio.create_task(_tick(clock))
        start, tasks = clock.now(), []
        for planned in point.requests:
            due = start + (planned.at_s or 0.0)
            while (left_s := due - clock.now()) > 0:
                await asyncio.sleep(min(PERIOD_S, left_s))
            body = _body(planned, model, output_tokens)
            timer, began = (time.perf_counter, time.perf_counter()) if planned.slo_class else (clock.now, due)
            tasks.append(asyncio.create_task(_outcome(session, url, body, planned, began, timer)))
        outcomes = await asyncio.gather(*tasks)
        ticking.cancel()
    return Sent(clock.now() - start, tuple(outcomes), accepted_per_draft=None, final=True)


async def _tick(clock: MachineClock) -> None:
    """Or a speed would hold for all the time in which nobody asked."""
    while True:
        clock.now()
        await asyncio.sleep(PERIOD_S)


def _body(planned: Planned, model: str, output_tokens: int) -> dict[str, Any]:
    classed = {"vllm_xargs": {"slo_class": planned.slo_class}} if planned.slo_class else {}
    return {
        "model": model, "messages": [{"role": "user", "content": planned.prompt}], "temperature": 0.0,
        "max_completion_tokens": output_tokens, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **classed,
    }  # fmt: skip


async def _outcome(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], planned: Planned, began: float,
    timer: Callable[[], float],
) -> Outcome:  # fmt: skip
    """`began`: by `timer`."""
    first = last = began
    tokens, error = 0, ""
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                error = f"{response.status}: {await response.text()}"
            async for line in response.content:
                chunk = json.loads(line.removeprefix(b"data: ")) if line.startswith(DATA) else {}
                if chunk.get("choices"):
                    last = timer()
                    first = last if first == began else first
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    except (aiohttp.ClientError, OSError, ValueError) as failed:
        error = f"{type(failed).__name__}: {failed}"
    return Outcome(planned.phase, planned.slo_class, last - began, first - began, tokens, error)
