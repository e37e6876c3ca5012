"""Asking pods for their state, over real connections, whatever is at the other end."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from outrider_crds.runtime_state import RuntimeState
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.serving_pods import ServingPods
from outrider_operator.kinds import DEPLOYMENT, POD, REPLICA_SET, SERVICE
from outrider_operator.service_metrics.pod_polls import PodStates, StateEndpoint
from outrider_operator.validation.reading import InvalidInput
from outrider_operator.validation.reports import MOST_BYTES

from tests.ports import free_port
from tests.unit.operator.documents import deployment, document, pod, replica_set
from tests.unit.operator.validation.test_states import STATE

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
BODY = json.dumps(STATE).encode()
SOON_S = 30.0
"""Far beyond what an answer takes; a busy machine may be slow without being wrong."""
CHAT = Key("ns", "chat")


async def test_a_state_that_comes_in_two_reads_is_read_to_its_end() -> None:
    """One read returns what has arrived: on a 10 Mbit link 30 of 30 polls of eight classes were lost."""

    async def in_two(writer: asyncio.StreamWriter) -> None:
        writer.write(_head(len(BODY)) + BODY[:100])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(BODY[100:])

    answer = await _ask(in_two)
    assert isinstance(answer, RuntimeState)
    assert answer.output_tokens == 7


async def _drips(writer: asyncio.StreamWriter) -> None:
    writer.write(_head(len(BODY)))
    for byte in BODY:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.1)


async def _never_ends(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def _is_huge(writer: asyncio.StreamWriter) -> None:
    writer.write(_head(MOST_BYTES * 100) + b" " * (MOST_BYTES * 2))
    await writer.drain()
    await asyncio.sleep(10)


async def _unpacks_to_more(writer: asyncio.StreamWriter) -> None:
    packed = gzip.compress(BODY + b" " * 10_000_000)
    writer.write(_head(len(packed), "Content-Encoding: gzip\r\n") + packed)


async def _talks_nonsense(writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\x01\x02 nonsense\r\n\r\n")


async def _floods_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 1_000_000 + b"\r\n\r\n")


async def _hangs_up(writer: asyncio.StreamWriter) -> None:
    writer.write(_head(len(BODY)) + BODY[:10])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_drips, "TooSlow"),
        (_never_ends, "TooLarge"),
        (_is_huge, "TooLarge"),
        (_unpacks_to_more, "NotAState"),
        (_talks_nonsense, "NoAnswer"),
        (_floods_headers, "NoAnswer"),
        (_hangs_up, "NoAnswer"),
    ],
)
async def test_a_hostile_answer_is_none_and_has_a_reason(answer: Answer, reason: str) -> None:
    """It is rejected in bounded time and memory, without an exception."""
    result = await asyncio.wait_for(_ask(answer, timeout_s=0.5 if reason == "TooSlow" else SOON_S), 2 * SOON_S)
    assert isinstance(result, InvalidInput)
    assert result.reason == reason


async def test_a_missing_pod_is_reported_in_words() -> None:
    """It stands in Updated: `ClientConnectorError(ConnectionKey(host=...` did."""
    endpoint = StateEndpoint(SOON_S)
    assert await endpoint.ask(f"http://127.0.0.1:{free_port()}") == InvalidInput(
        "state", "NoAnswer", "Connection refused"
    )
    await endpoint.close()


@pytest.mark.parametrize(
    ("status", "body", "detail"),
    [
        ("503 No", b'{"error": "not active: vLLM 0.31\\u001b[2J"}', "HTTP status 503: not active: vLLM 0.31"),
        ("404 Not Found", b'{"detail": "Not Found"}', "HTTP status 404"),
        ("503 No", b'{"error": ["a", "list"]}', "HTTP status 503"),
        ("503 No", b"[" * 5000, "HTTP status 503"),
        ("503 No", json.dumps({"error": "x" * 5000}).encode(), f"HTTP status 503: {'x' * 255}…"),
    ],
    ids=["reason", "no plugin", "no text", "no JSON", "long"],
)  # fmt: skip
async def test_pod_without_a_state_is_reported_with_its_reason(status: str, body: bytes, detail: str) -> None:
    async def refuses(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    assert await _ask(refuses) == InvalidInput("state", "NoAnswer", detail)


async def test_pod_with_a_certificate_of_its_own_is_read(tmp_path: Path) -> None:
    """KServe has vLLM serve HTTPS. What a pod answers is not trusted, whatever its certificate."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=pod",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    endpoint = StateEndpoint(SOON_S)
    async with _server(_says(BODY), tls=context) as port:
        assert isinstance(await endpoint.ask(f"https://127.0.0.1:{port}"), RuntimeState)
        assert isinstance(await endpoint.ask(f"http://127.0.0.1:{port}"), InvalidInput)
    await endpoint.close()


async def test_a_redirect_is_not_followed() -> None:
    """A pod would have the operator ask an address of its choice."""
    async with _server(_says(BODY)) as elsewhere:

        async def redirects(writer: asyncio.StreamWriter) -> None:
            location = f"Location: http://127.0.0.1:{elsewhere}/\r\nContent-Length: 0\r\n"
            writer.write(f"HTTP/1.1 302 Found\r\n{location}\r\n".encode())

        assert await _ask(redirects) == InvalidInput("state", "NoAnswer", "HTTP status 302")


@pytest.mark.usefixtures("pods")
async def test_one_pod_that_answers_nonsense_delays_no_other_poll(cache: ObjectCache) -> None:
    """A 400-digit counter, a pod without a service label: the others' states still come in."""
    bad = json.dumps({**STATE, "outputTokens": "@"}).replace('"@"', "9" * 400).encode()
    cache.seen(POD, pod("stray", service=None))
    cache.seen(POD, pod("bad", address="127.0.0.2"))
    cache.seen(POD, pod("good", address="127.0.0.1"))
    heard: list[Key] = []
    async with _server(_says(BODY)) as port, _server(_says(bad), "127.0.0.2", port):
        states = PodStates(ServingPods(cache, admin_port=port), StateEndpoint(), heard.append, busy_every_s=0.1)
        async with _running(states), asyncio.timeout(SOON_S):
            while not states.states(CHAT):
                await asyncio.sleep(0.02)
        assert list(states.states(CHAT)) == ["good"]
        assert set(heard) == {CHAT}  # also that the other one does not answer is news


@pytest.mark.usefixtures("pods")
async def test_state_of_pod_outlasts_lost_polls(monkeypatch: pytest.MonkeyPatch, cache: ObjectCache) -> None:
    """A draft canary on a slow network would flap between Measuring and Error."""
    monkeypatch.setattr("outrider_operator.service_metrics.pod_polls.TICK_S", 0.01)
    cache.seen(POD, pod("good"))
    answers = [BODY]

    async def once(writer: asyncio.StreamWriter) -> None:
        body = answers.pop() if answers else b"lost"
        writer.write(_head(len(body)) + body)

    async with _server(once) as port:
        states = PodStates(ServingPods(cache, admin_port=port), StateEndpoint(), lambda _: None, busy_every_s=0.0)
        async with _running(states), asyncio.timeout(SOON_S):
            while not states.unreachable(CHAT):
                await asyncio.sleep(0.01)
        assert list(states.states(CHAT)) == ["good"]


@pytest.mark.usefixtures("pods")
async def test_a_pod_that_answers_nonsense_is_polled_rarely(
    monkeypatch: pytest.MonkeyPatch, cache: ObjectCache
) -> None:
    """Its service waits for it for ever: eight such pods, polled every second, took all of the operator's CPU."""
    monkeypatch.setattr("outrider_operator.service_metrics.pod_polls.TICK_S", 0.01)
    monkeypatch.setattr("outrider_operator.service_metrics.pod_polls.URGENT_EVERY_S", 0.0)
    cache.seen(POD, pod("bad", address="127.0.0.2"))
    cache.seen(POD, pod("good", address="127.0.0.1"))
    good: list[bytes] = []
    bad: list[bytes] = []
    async with (
        _server(_says(BODY, good.append)) as port,
        _server(_says(b"{}", bad.append), "127.0.0.2", port),
    ):
        states = PodStates(ServingPods(cache, admin_port=port), StateEndpoint(), lambda _: None, busy_every_s=0.0)
        states.set_urgent(CHAT, True)
        async with _running(states), asyncio.timeout(SOON_S):
            while len(good) < 10:
                await asyncio.sleep(0.01)
    assert len(bad) == 1


@pytest.mark.usefixtures("pods")
async def test_first_round_does_not_wait_for_silent_pods(monkeypatch: pytest.MonkeyPatch, cache: ObjectCache) -> None:
    """The operator's start would be a tenant's to delay."""
    monkeypatch.setattr("outrider_operator.service_metrics.pod_polls.TICK_S", 0.01)
    monkeypatch.setattr("outrider_operator.service_metrics.pod_polls.FIRST_ROUND_S", 0.1)
    cache.seen(POD, pod("silent"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_pods = ServingPods(cache, admin_port=silent.getsockname()[1])
        states = PodStates(silent_pods, StateEndpoint(10 * SOON_S), lambda _: None, 1.0)
        async with _running(states):
            await asyncio.wait_for(states.first_round(), SOON_S)


@pytest.mark.usefixtures("pods")
async def test_the_first_round_polls_no_pod_twice(cache: ObjectCache) -> None:
    """It polled every pod that was being polled already, in tasks that never ended."""
    cache.seen(POD, pod("good"))
    requests: list[bytes] = []
    async with _server(_says(BODY, requests.append)) as port:
        states = PodStates(
            ServingPods(cache, admin_port=port), StateEndpoint(), lambda _: None, busy_every_s=10 * SOON_S
        )
        async with _running(states):
            await asyncio.wait_for(states.first_round(), SOON_S)
            assert list(states.states(CHAT)) == ["good"]
    assert len(requests) == 1


async def test_thousands_of_pods_do_not_block_the_event_loop() -> None:
    """Each search for pods to poll went through all pods in one callback: with 8,000 of them it took 0.1 s of CPU,
    twice a second, and the Lease waited."""
    cache, services = ObjectCache(), 50
    pods = ServingPods(cache)
    for number in range(services):
        name = f"chat-{number}"
        cache.seen(SERVICE, document(name, 1, uid=name))
        cache.seen(DEPLOYMENT, deployment(name))
        cache.seen(REPLICA_SET, replica_set(name))
        cache.seen(POD, pod(f"{name}-pod", service=name, owner=f"{name}-rs"))
    states, others = PodStates(pods, StateEndpoint(), lambda _: None, 1.0), 0
    looking = asyncio.create_task(_drained(states._pollable()))
    while not looking.done():
        await asyncio.sleep(0)
        others += 1
    assert len(looking.result()) == services
    assert others >= services


async def _drained(result: AsyncIterator[object]) -> list[object]:
    return [item async for item in result]


@asynccontextmanager
async def _running(states: PodStates) -> AsyncIterator[None]:
    running = asyncio.create_task(states.run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def _says(body: bytes, requests: Callable[[bytes], None] = lambda _: None) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        requests(body)
        writer.write(_head(len(body)) + body)

    return answer


def _head(length: int, more: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n{more}\r\n".encode()


async def _ask(answer: Answer, timeout_s: float = SOON_S) -> RuntimeState | InvalidInput:
    async with _server(answer) as port:
        endpoint = StateEndpoint(timeout_s)
        try:
            return await endpoint.ask(f"http://127.0.0.1:{port}")
        finally:
            await endpoint.close()


@asynccontextmanager
async def _server(
    answer: Answer, address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, address, port, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
