"""Which services a pod's answers reach, and which answers wake them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import pytest
from outrider_crds.runtime_state import RuntimeState
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.serving_pods import ServingPods
from outrider_operator.cluster_model import Object
from outrider_operator.kinds import SERVICE
from outrider_operator.service_metrics import pod_polls
from outrider_operator.service_metrics.pod_polls import PodStates, StateEndpoint
from outrider_operator.validation.reading import InvalidInput

from tests.unit.operator.documents import document, pod
from tests.unit.operator.validation.test_states import STATE

CHAT = Key("ns", "chat")
PATIENCE_S = 30.0
REFUSED = InvalidInput("state", "NoAnswer", "Connection refused")
Answer = RuntimeState | InvalidInput


class OnePod:
    """Pod `a`, which all services select."""

    def of(self, _: Key) -> tuple[Object, ...]:
        return (pod("a", service=None),)

    def other_services(self, _: Key) -> Mapping[str, str]:
        return {}


class Answers:
    """Answers the last of `answers` for ever, and the earlier ones once each."""

    def __init__(self, of_port: Mapping[int, list[Answer]]) -> None:
        self.of_port = of_port
        self.polls: list[int] = []

    async def ask(self, url: str) -> Answer:
        port = int(url.split(":")[2].split("/")[0])
        self.polls.append(port)
        answers = self.of_port[port]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TICK_S", "IDLE_EVERY_S"):
        monkeypatch.setattr(pod_polls, name, 0.001)


def state(**changes: Any) -> RuntimeState:
    return RuntimeState.model_validate(STATE).model_copy(update=changes)


def selecting(ports: Mapping[str, int]) -> ServingPods:
    cache = ObjectCache()
    for version, (name, port) in enumerate(ports.items(), 1):
        existing = {"podSelector": {"matchLabels": {"app": "a"}}, "port": port}
        cache.seen(SERVICE, document(name, version, uid=name, spec={"workload": {"existing": existing}}))
    return ServingPods(cache, OnePod())


async def until(states: PodStates, is_done: Callable[[], bool]) -> None:
    running = asyncio.create_task(states.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not is_done():
                await asyncio.sleep(0.001)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.mark.parametrize("names", [("chat", "other"), ("other", "chat")], ids=["first", "last"])
async def test_services_of_one_pod_are_polled_at_own_ports(names: tuple[str, str]) -> None:
    """The first service's port was polled for both: the other one was unreachable for good."""
    ports = {"chat": 8000, "other": 9999}
    pods = selecting({name: ports[name] for name in names})
    endpoint = Answers({8000: [state()], 9999: [REFUSED]})
    states = PodStates(pods, cast(StateEndpoint, endpoint), lambda _: None, 0.0)
    await until(states, lambda: {8000, 9999} <= set(endpoint.polls[:-2]))
    assert [list(states.states(Key("ns", name))) for name in ("chat", "other")] == [["a"], []]
    assert [states.unreachable(Key("ns", name)) for name in ("chat", "other")] == [{}, {"a": "Connection refused"}]


async def test_services_of_one_endpoint_share_polls_and_news() -> None:
    """Each of many services would poll the pod. Only the service that polled it heard of its news."""
    pods, heard = selecting({f"s{number}": 8000 for number in range(20)}), list[Key]()
    endpoint = Answers({8000: [state(), state(ready=False)]})
    states = PodStates(pods, cast(StateEndpoint, endpoint), heard.append, 0.0)
    await until(states, lambda: len(endpoint.polls) > 3)
    assert sorted(heard[-20:]) == sorted(pods.services())
    assert len(heard) < 20 * 3


@pytest.mark.parametrize(
    "answers",
    [
        [state(), state(file_digest="new")],
        [state(), state(restart_reason="draftPool needs a restart")],
        [state(), state(plugin_active=False)],
        [REFUSED, InvalidInput("state", "NoAnswer", "HTTP status 503: Outrider is not active")],
        [state(), REFUSED],
        [REFUSED, state()],
    ],
    ids=["file", "restart", "plugin", "error changed", "error", "answer"],
)
async def test_answer_that_conditions_quote_wakes_once(answers: list[Answer]) -> None:
    """Conditions stayed wrong until the next resync: for a minute."""
    heard, endpoint = list[Key](), Answers({8000: answers})
    states = PodStates(selecting({"chat": 8000}), cast(StateEndpoint, endpoint), heard.append, 0.0)
    await until(states, lambda: len(endpoint.polls) > 5)
    assert heard == [CHAT, CHAT]


async def test_pod_that_recovers_with_the_same_state_wakes() -> None:
    heard, endpoint = list[Key](), Answers({8000: [state(), REFUSED, state()]})
    states = PodStates(selecting({"chat": 8000}), cast(StateEndpoint, endpoint), heard.append, 0.0)
    await until(states, lambda: len(endpoint.polls) > 5)
    assert heard == [CHAT, CHAT, CHAT]
