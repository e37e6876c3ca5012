"""Requests to a real server: what is served, what is refused, and that nothing a client sends ends it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from outrider_crds.runtime_state import RuntimeState

from tests.engine.conftest import BROKEN, Laptop
from tests.engine.server_process import REPETITIVE, Server

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"


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
    assert state.engine_version.startswith("0.32")
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


def test_answers_stream_token_by_token(laptop: Laptop) -> None:
    """The gate does not buffer."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count to ten."}],
        "max_tokens": 96,
        "ignore_eos": True,
        "stream": True,
    }
    with laptop.server.api.stream(
        "POST", "/v1/chat/completions", json=body, headers={"X-SLO-Class": "batch"}
    ) as answer:
        assert answer.status_code == 200
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    pieces = [json.loads(event[6:])["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert sum(1 for piece in pieces if piece) >= 3


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


def _chat(**fields: Any) -> bytes:
    return json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
    ).encode()


def _completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 4, **fields}).encode()


BEYOND = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 1.8e19}}}
BAD_CHATS = {
    "malformed JSON": b'{"model": ',
    "empty body": b"",
    "a list": b"[]",
    "not UTF-8": b'{"model": "\xff"}',
    "unknown model": _chat(model="gpt-5"),
    "no messages": json.dumps({"model": MODEL}).encode(),
    "empty messages": _chat(messages=[]),
    "prompt longer than the limit": _chat(messages=[{"role": "user", "content": "word " * 5000}]),
    "max_tokens beyond the limit": _chat(max_tokens=100_000),
    "negative max_tokens": _chat(max_tokens=-5),
    "max_tokens of text": _chat(max_tokens="many"),
    "max_tokens of 30 digits": _chat(max_tokens=10**30),
    "NaN temperature": _chat(temperature=float("nan")),
    "infinite temperature": b'{"model": "' + MODEL.encode() + b'", "messages": [], "temperature": 1e999}',
    "negative temperature": _chat(temperature=-1),
    "top_p beyond 1": _chat(top_p=2),
    "top_k of 31 digits": _chat(top_k=10**30, temperature=1),
    "huge n": _chat(n=10**6),
    "n of 0": _chat(n=0),
    "huge seed": _chat(seed=2**70),
    "zero repetition penalty": _chat(repetition_penalty=0),
    "presence penalty of 100": _chat(presence_penalty=100),
    "token beyond the vocabulary in logit_bias": _chat(logit_bias={"9999999": 5}),
    "vllm_xargs of a list": _chat(vllm_xargs=[1]),
    "vllm_xargs of objects": _chat(vllm_xargs={"other": {"a": 1}}),
    "vllm_xargs of the engine's own": _chat(vllm_xargs={"kv_transfer_params": "x"}),
    "unknown SLO class": _chat(vllm_xargs={"slo_class": "gold"}),
    "SLO class of a number": _chat(vllm_xargs={"slo_class": 7}),
    "broken grammar": _chat(structured_outputs={"grammar": "root ::= ("}),
    "broken regular expression": _chat(structured_outputs={"regex": "(((("}),
    "schema bound beyond the grammar compiler": _chat(structured_outputs={"json": BEYOND}),
    "format bound beyond the grammar compiler": _chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": BEYOND}}
    ),
    "priority of 30 digits": _chat(priority=10**30),
    "half of a surrogate pair": _chat(stop=["\ud800"]),
    "more biases than the sampler has room for": _chat(logit_bias={str(token): -1 for token in range(1025)}),
    "more stop tokens than the sampler has room for": _chat(min_tokens=2, stop_token_ids=list(range(3, 131))),
    "a bad word of more tokens than the sampler has room for": _chat(bad_words=["a b " * 600]),
}
BAD_COMPLETIONS = {
    "token beyond the vocabulary": _completion(prompt=[10**7]),
    "negative token": _completion(prompt=[-1]),
    "empty prompt list": _completion(prompt=[]),
    "empty allowed tokens": _completion(allowed_token_ids=[]),
    "more allowed tokens than the sampler has room for": _completion(allowed_token_ids=list(range(1025))),
    "negative prompt logprobs": _completion(prompt_logprobs=-5),
}
BAD = {
    **{name: ("/v1/chat/completions", body) for name, body in BAD_CHATS.items()},
    **{name: ("/v1/completions", body) for name, body in BAD_COMPLETIONS.items()},
    "raw engine route": ("/inference/v1/generate", b"{}"),
    "adapter route": ("/v1/load_lora_adapter", b"{}"),
}


RECORDED: dict[str, list[object]] = json.loads(Path(__file__).with_name("recorded_errors.json").read_text())
"""Bad requests, with status and error type of vLLM's answer; the Torch backend answers the same."""


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


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(token): -1 for token in range(1024)}},
        {"allowed_token_ids": list(range(1024))},
        {"min_tokens": 2, "stop_token_ids": list(range(3, 130))},
        {"stop_token_ids": list(range(3, 1000))},
        {"bad_words": ["a b " * 200]},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_request_that_just_fits_the_sampler_is_served(laptop: Laptop, fields: dict[str, Any]) -> None:
    """The model has one stop token of its own; without min_tokens the sampler knows none."""
    answer = laptop.server.post("/v1/completions", _completion(**fields))
    assert answer.status_code == 200, answer.text


def test_stream_beyond_the_samplers_room_ends_with_the_field(laptop: Laptop) -> None:
    """vLLM sends the status of a stream before it looks at the request."""
    body = _completion(stream=True, logit_bias={str(token): -1 for token in range(1025)})
    text = laptop.server.post("/v1/completions", body).text
    assert "logit_bias takes 1025 tokens, and the engine has room for 1024" in text
    assert laptop.server.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize("maximum", [9223372036854776000, 2**64 - 1])
def test_tool_with_a_bound_beyond_64_bits_is_served(laptop: Laptop, maximum: int) -> None:
    """It was a 400 for every request of an agent with such a tool."""
    schema = {"type": "object", "properties": {"offset": {"type": "integer", "maximum": maximum}}}
    tools = [{"type": "function", "function": {"name": "read", "parameters": schema}}]
    answer = laptop.server.chat(tools=tools, tool_choice="none")
    assert answer.status_code == 200, answer.text


def test_seeded_and_greedy_requests_share_a_batch(laptop: Laptop) -> None:
    """Stock vLLM on a CPU dies of this ("CPU Generator does not use offset"); here seeds repeat themselves."""
    answers: dict[str, httpx.Response] = {}

    def ask(name: str, **fields: Any) -> Callable[[], None]:
        def send() -> None:
            answers[name] = laptop.server.chat("Tell me a story.", max_tokens=24, **fields)

        return send

    kinds = {
        "seeded": ask("seeded", seed=7, temperature=0.8),
        "same seed": ask("same seed", seed=7, temperature=0.8),
        "greedy": ask("greedy", temperature=0),
        "sampled": ask("sampled", temperature=0.8),
    }
    threads = [threading.Thread(target=body) for body in kinds.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: answer.status_code for name, answer in answers.items()} == dict.fromkeys(kinds, 200)
    assert laptop.server.is_ready()


def test_a_grammar_bound_request_shares_the_batch(laptop: Laptop) -> None:
    """Its steps are two calls to the worker, as the mask is made while the target runs; the others' are one."""
    answers: list[httpx.Response] = []
    other = threading.Thread(
        target=lambda: answers.append(laptop.server.chat(REPETITIVE, max_tokens=48, temperature=0))
    )
    other.start()
    bound = laptop.server.chat(
        "Say 1 2 3.", max_tokens=32, temperature=0, structured_outputs={"regex": "(1 2 3 ){4}"}
    )  # fmt: skip
    other.join()
    assert bound.json()["choices"][0]["message"]["content"].split() == ["1", "2", "3"] * 4
    assert answers[0].json()["usage"]["completion_tokens"] > 0


def test_a_client_that_hangs_up_frees_the_engine(laptop: Laptop) -> None:
    """vLLM aborts the request: the gate passes the disconnect on."""
    server = laptop.server
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with server.api.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: an iterator that is dropped hangs up
        next(lines)
        server.wait_until("the gauge", lambda: _running(server) == 1)  # vLLM sets it after the step
    server.wait_until("the abort", lambda: _running(server) == 0)


def _running(server: Server) -> float:
    return server.metric("vllm:num_requests_running")
