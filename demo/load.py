"""Streamed chat requests to an OpenAI-compatible endpoint at a chosen concurrency; each outcome is kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

PROMPTS = Path(__file__).with_name("prompts.txt")


@dataclass(frozen=True)
class Answer:
    """Outcome of one request, as its user saw it."""

    error: str
    tokens: int
    ttft_s: float
    tpot_s: float


@dataclass
class Load:
    """A running load; `concurrency` may be changed while it runs."""

    base_url: str
    model: str
    slo_classes: tuple[str, ...] = ()
    max_tokens: int = 64
    concurrency: int = 1
    thinking_s: float = 0.0
    """Seconds between an answer and the user's next request."""
    answers: list[Answer] = field(default_factory=list)
    _stopping: bool = False

    async def run(self) -> None:
        """Keep `concurrency` users busy until `stop`; then let the running requests finish."""
        prompts = shuffled_prompts()
        running: set[asyncio.Task[Answer]] = set()
        # A Service balances connections: one that is kept never reaches a pod that is newer than it is.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.base_url, timeout=120.0, limits=limits) as client:
            while not self._stopping or running:
                while not self._stopping and len(running) < self.concurrency:
                    running.add(asyncio.create_task(self._ask(client, next(prompts))))
                done, running = await asyncio.wait(running, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
                self.answers += [task.result() for task in done]

    def stop(self) -> None:
        self._stopping = True

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error]

    async def _ask(self, client: httpx.AsyncClient, prompt: str) -> Answer:
        headers = {"X-SLO-Class": random.choice(self.slo_classes)} if self.slo_classes else {}
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            answer = await _stream(client, body, headers)
        except (httpx.HTTPError, ValueError) as error:
            answer = Answer(f"{type(error).__name__}: {error}", 0, 0.0, 0.0)
        await asyncio.sleep(0 if self._stopping else self.thinking_s)
        return answer


async def _stream(client: httpx.AsyncClient, body: dict[str, object], headers: dict[str, str]) -> Answer:
    sent = time.monotonic()
    first = 0.0
    tokens = 0
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            return Answer(f"HTTP {response.status_code}: {text[:200]}", 0, 0.0, 0.0)
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk.get("error"):
                return Answer(str(chunk["error"])[:200], 0, 0.0, 0.0)
            first = first or time.monotonic()
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    if not tokens:
        return Answer("the answer ended before its usage was reported", 0, 0.0, 0.0)
    # By tokens: chunks carry several tokens each, so the mean time between chunks is not the TPOT.
    tpot = (time.monotonic() - first) / (tokens - 1) if tokens > 1 else 0.0
    return Answer("", tokens, first - sent, tpot)


def shuffled_prompts(seed: int = 0) -> Iterator[str]:
    """Yield the demo's prompts in a fixed random order, again and again."""
    prompts = [line for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line.strip()]
    random.Random(seed).shuffle(prompts)
    return itertools.cycle(prompts)
