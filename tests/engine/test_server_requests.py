"""Requests to a real server: what is served, what is refused, and that nothing a client sends ends it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from outrider_crds.runtime_state import RuntimeState
from outrider_runtime.identity import engine_version

from tests.engine.client_cases import BAD, GOOD, MODEL, RECORDED
from tests.engine.conftest import BROKEN, Laptop
from tests.engine.server_process import REPETITIVE

pytestmark = pytest.mark.model


def test_a_chat_request_is_answered_with_the_plugin_active(laptop: Laptop) -> None:
    """Issue 3: vLLM's own OpenAI server with the plugin active; the state says what it did."""
    server = laptop.server
    before = server.state()
    with laptop.speculating():
        answer = server.chat(REPETITIVE, max_tokens=48, temperature=0)
        assert answer.status_code == 200
        tokens = answer.json()["usage"]["completion_tokens"]
        server.wait_until("the state", lambda: server.state().output_tokens >= before.output_tokens + tokens)
    state = server.state()
    assert state.ready
    assert state.plugin_active
    assert state.engine_version == engine_version()
    loaded = {drafter.name: drafter.loaded for drafter in state.drafters}
    assert loaded == {"lookup": True, "eagle": True, BROKEN: False}
    assert state.steps > before.steps
    assert state.speculative_steps > before.speculative_steps
    assert 0 < sum(drafter.accepted for drafter in state.drafters) <= sum(drafter.tried for drafter in state.drafters)


def test_no_proposal_counts_as_a_token_of_the_answer(laptop: Laptop) -> None:
    """What is billed is what was answered, whatever was proposed and rejected on the way."""
    server, before = laptop.server, laptop.server.state()
    body = {"model": MODEL, "prompt": REPETITIVE, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with laptop.speculating():
        answer = server.post("/v1/completions", json.dumps({**body, "logprobs": 1}).encode()).json()
        assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["logprobs"]["tokens"]) == 60
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 60
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        lines = server.post("/v1/completions", json.dumps(streamed).encode()).text.splitlines()
        last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")][-1]
        assert last["usage"]["completion_tokens"] == 60
        server.wait_until("the state", lambda: server.state().output_tokens >= before.output_tokens + 120)
    assert server.state().proposed_tokens > before.proposed_tokens


@pytest.mark.parametrize(
    ("headers", "fields", "counted"),
    [
        ({"X-SLO-Class": "batch"}, {}, "batch"),
        ({}, {"vllm_xargs": {"slo_class": "batch"}}, "batch"),
        ({"X-SLO-Class": "batch"}, {"vllm_xargs": {"slo_class": "interactive"}}, "batch"),
        ({}, {}, "interactive"),
    ],
    ids=["header", "body", "header wins", "default"],
)
def test_a_request_counts_for_its_slo_class(
    laptop: Laptop, headers: dict[str, str], fields: dict[str, Any], counted: str
) -> None:
    """Attainment is counted per class, from header or body; the default class takes the rest."""
    server = laptop.server

    def finished(state: RuntimeState) -> dict[str, int]:
        return {slo.name: slo.finished for slo in state.slo_classes}

    before = finished(server.settled_state())
    assert server.chat(headers=headers, **fields).status_code == 200
    expected = {name: count + (name == counted) for name, count in before.items()}
    server.wait_until("the count", lambda: finished(server.state()) != before)
    assert finished(server.state()) == expected
    assert server.metric("outrider_slo_class_finished_total", slo_class=counted) == expected[counted]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_a_4xx_and_the_pod_lives_on(laptop: Laptop, name: str) -> None:
    """Issue 3, "what bad input gets": an OpenAI-style error body; the next request is served."""
    path, body = BAD[name]
    answer = laptop.server.post(path, body)
    error = answer.json()["error"]
    assert [answer.status_code, error["type"]] == RECORDED[name], answer.text
    assert 400 <= answer.status_code < 500
    assert error["code"] == answer.status_code
    assert isinstance(error["message"], str)
    assert error["message"]
    assert laptop.server.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize("name", GOOD)
def test_what_clients_send_is_served(laptop: Laptop, name: str) -> None:
    GOOD[name](laptop.server)
    assert laptop.server.is_ready()
