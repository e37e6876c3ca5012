"""The OpenAI API on an engine with a tiny model: which fields are served, and how others are refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pydantic_core
import pytest
from outrider_runtime.server import strict_json
from outrider_runtime.server.gate import GateFacts, RequestGate
from outrider_runtime.torch_engine import app, openai_requests
from outrider_runtime.torch_engine.app import ApiService, make_app
from outrider_runtime.torch_engine.inference_engine import InferenceEngine
from outrider_runtime.torch_engine.openai_requests import WRONG_TYPE
from outrider_runtime.torch_engine.text import Text
from outrider_runtime.torch_engine.thread import Client
from pydantic import ValidationError

from tests.unit.torch_engine.engines import LONGEST, make_harness
from tests.unit.torch_engine.models import VOCABULARY

MODEL = "tiny"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, InferenceEngine]]:
    engine = make_harness(folder).engine
    client = Client(engine)
    routes = make_app(ApiService(MODEL, Text(folder, VOCABULARY), VOCABULARY, LONGEST, client))
    transport = httpx.ASGITransport(RequestGate(routes, lambda: GateFacts(slo_classes=(), draining=False)))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        yield http, engine
    client.stop()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 1, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "abc", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = (await http.post(path, json=body)).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_stream_joined_equals_whole_answer(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    http, _ = served
    whole = (await http.post(CHAT, json=chat(ignore_eos=True))).json()
    parts = await events(http, CHAT, chat(ignore_eos=True, stream=True, stream_options={"include_usage": True}))
    assert whole["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
    choice = whole["choices"][0]
    assert len(choice["message"]["content"]) == 6
    assert choice["finish_reason"] == "length"
    deltas = [part["choices"][0] for part in parts if part["choices"]]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == choice["message"]["content"]
    assert [delta["finish_reason"] for delta in deltas if delta.get("finish_reason")] == ["length"]
    assert parts[-1]["usage"] == whole["usage"]


async def test_answer_has_the_clients_request_id(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    """vLLM makes it likewise. Two requests at once with one id are both answered: the engine names them apart."""
    http, _ = served
    headers = {"X-Request-Id": "order-17"}
    posts = (http.post(path, json=body, headers=headers) for path, body in ((CHAT, chat()), (CHAT, chat())))
    answers = await asyncio.gather(*posts, http.post(COMPLETION, json=completion(), headers=headers))
    assert [answer.json()["id"] for answer in answers] == ["chatcmpl-order-17", "chatcmpl-order-17", "cmpl-order-17"]


async def test_stop_string_ends_answer_and_is_cut_off(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    """The stream holds back what may begin a stop string; the usage does not count tokens after it."""
    http, _ = served
    text = (await http.post(COMPLETION, json=completion(max_tokens=12))).json()["choices"][0]["text"]
    stop = text[4:6]
    at = text.index(stop)
    body = completion(max_tokens=12, stop=["never", stop])
    answer = (await http.post(COMPLETION, json=body)).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:at], "stop", stop)
    assert answer["usage"]["completion_tokens"] == at + len(stop)
    parts = await events(http, COMPLETION, {**body, "stream": True})
    assert "".join(part["choices"][0]["text"] for part in parts) == text[:at]


async def test_stop_and_end_tokens_end_answer(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    http, _ = served
    plain = (await http.post(COMPLETION, json=completion(logprobs=0))).json()["choices"][0]
    token = ord(plain["text"][2]) - 32
    first = plain["text"].index(plain["text"][2])
    cut = (await http.post(COMPLETION, json=completion(stop_token_ids=[token]))).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (plain["text"][:first], "stop", token)
    ended = completion(ignore_eos=False, logit_bias={"0": 100})
    choice = (await http.post(COMPLETION, json=ended)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)


async def test_completion_of_several_prompts_has_a_choice_each(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    http, _ = served
    alone = [
        (await http.post(COMPLETION, json=completion(prompt=prompt))).json()["choices"][0]["text"]
        for prompt in ("abc", [7, 8])
    ]
    answer = (await http.post(COMPLETION, json=completion(prompt=[[65, 66, 67], [7, 8]]))).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["text"] for choice in answer["choices"]] == alone
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}


async def test_prompts_of_one_request_without_seed_differ(folder: Path) -> None:
    """Bug: with one seed for all, the same prompt twice had the same answer twice."""
    service = ApiService(MODEL, Text(folder, VOCABULARY), VOCABULARY, LONGEST, Mock())
    for seed, distinct in ((None, 3), (7, 1)):
        body, prompts = service.completion(completion(prompt=["abc"] * 3, seed=seed))
        seeds = [request.sampling.seed for request in service.requests(body, "r", prompts)]
        assert len({*seeds}) == distinct


async def test_logprobs_have_the_shape_of_each_endpoint(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    http, _ = served
    answer = (await http.post(CHAT, json=chat(temperature=0, logprobs=True, top_logprobs=2))).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)
    choice = (await http.post(COMPLETION, json=completion(logprobs=2))).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == list(choice["text"])
    assert [len(entry) for entry in choice["logprobs"]["top_logprobs"]] == [2] * 6


@pytest.mark.parametrize("most", [0, 1])
async def test_completion_logprobs_include_drawn_token(
    served: tuple[httpx.AsyncClient, InferenceEngine], most: int
) -> None:
    """Bug: a drawn token that was not among the most probable ones was missing; vLLM reports it."""
    http, _ = served
    body = completion(logprobs=most, temperature=2.0, seed=3, max_tokens=20)
    logprobs = (await http.post(COMPLETION, json=body)).json()["choices"][0]["logprobs"]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert len(top) <= most + 1
    assert max(len(top) for top in logprobs["top_logprobs"]) == most + 1


async def test_stream_text_offsets_continue_across_events(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    """Bug: every event's offsets began at 0."""
    http, _ = served
    body = completion(logprobs=0, prompt=["abc", "xyz"])
    whole_offsets = [
        choice["logprobs"]["text_offset"] for choice in (await http.post(COMPLETION, json=body)).json()["choices"]
    ]
    assert whole_offsets == [list(range(6))] * 2
    stream_offsets: list[list[int]] = [[], []]
    for part in await events(http, COMPLETION, {**body, "stream": True}):
        for choice in part["choices"]:
            stream_offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert stream_offsets == whole_offsets


async def test_tiny_temperature_is_greedy(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    """Bug: logits divided by 1e-310 were infinite, and the first of those tokens was drawn."""
    http, _ = served
    texts = {
        (await http.post(COMPLETION, json=completion(temperature=temperature))).json()["choices"][0]["text"]
        for temperature in (0, 1e-310, 1e-6)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("temperature", [0, 1])
async def test_tiny_repetition_penalty_only_repeats(
    served: tuple[httpx.AsyncClient, InferenceEngine], temperature: float
) -> None:
    """Bug: the inverse of the penalty overflowed a float, and the engine stopped."""
    http, _ = served
    body = completion(repetition_penalty=1e-300, temperature=temperature, prompt=[5, 5, 5], logit_bias={"5": 100})
    answer = await http.post(COMPLETION, json=body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "%" * 6


async def test_prompt_leaving_room_for_one_token_is_served(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    http, _ = served
    body = completion(prompt=[5] * (LONGEST - 1), max_tokens=None)
    assert (await http.post(COMPLETION, json=body)).json()["usage"]["completion_tokens"] == 1
    full = await http.post(COMPLETION, json={**body, "prompt": [5] * LONGEST})
    assert full.status_code == 400
    assert f"maximum context length is {LONGEST} tokens" in full.json()["error"]["message"]


async def test_stream_with_stop_string_has_logprobs_of_all_tokens(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    """Tokens whose text is held back have logprobs too: as many as the usage counts."""
    http, _ = served
    plain = (await http.post(COMPLETION, json=completion(max_tokens=12))).json()["choices"][0]["text"]
    body = completion(max_tokens=12, logprobs=1, stop=plain[5:9])
    whole = (await http.post(COMPLETION, json=body)).json()
    tokens = whole["choices"][0]["logprobs"]["tokens"]
    assert len(tokens) == whole["usage"]["completion_tokens"]
    parts = await events(http, COMPLETION, {**body, "stream": True})
    streamed = [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]
    assert [token for part in streamed for token in part["tokens"]] == tokens
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]


async def test_tokenizing_runs_off_the_event_loop(
    served: tuple[httpx.AsyncClient, InferenceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a text of many megabytes blocked all answers and probes."""
    http, _ = served
    threads, encode = set[threading.Thread](), Text.encode

    def noting(self: Text, text: str, *, special: bool = True) -> list[int]:
        threads.add(threading.current_thread())
        return encode(self, text, special=special)

    monkeypatch.setattr(Text, "encode", noting)
    await http.post(COMPLETION, json=completion())
    await http.post(CHAT, json=chat())
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("prompt", ["w" * 5000, ["a", "w" * 5000], [1] * (LONGEST + 1), [[1] * (LONGEST + 1)]])
async def test_prompt_too_long_is_refused_unread(
    served: tuple[httpx.AsyncClient, InferenceEngine], monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    """Bug: ten million tokens blocked answers and probes for most of a minute. A token has at most 5 characters."""
    http, _ = served
    reading = Mock()
    for name in ("parse", "check_tokens"):
        monkeypatch.setattr(app, name, reading)
    monkeypatch.setattr(Text, "encode", reading)
    error = (await http.post(COMPLETION, json=completion(prompt=prompt))).json()["error"]
    assert (error["code"], error["param"]) == (400, "prompt")
    assert f"maximum context length is {LONGEST} tokens" in error["message"]
    reading.assert_not_called()


async def test_chat_too_long_is_refused_before_tokenizing(
    served: tuple[httpx.AsyncClient, InferenceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    http, _ = served
    encode = Mock()
    monkeypatch.setattr(Text, "encode", encode)
    error = (await http.post(CHAT, json=chat(messages=[{"role": "user", "content": "w" * 5000}]))).json()["error"]
    assert (error["code"], error["param"]) == (400, "messages")
    encode.assert_not_called()


async def test_bodies_are_parsed_once_and_off_the_event_loop(
    served: tuple[httpx.AsyncClient, InferenceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a body of many megabytes blocked all answers and probes, twice."""
    http, _ = served
    threads, parse = list[threading.Thread](), pydantic_core.from_json

    def noting(*arguments: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(*arguments, **named)

    bodies = [(COMPLETION, json.dumps(completion())), (CHAT, json.dumps(chat()))]
    monkeypatch.setattr(strict_json, "from_json", noting)
    monkeypatch.setattr(json, "loads", noting)
    answers = [await http.post(path, content=body) for path, body in bodies]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(threads) == 2
    assert threading.current_thread() not in threads


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [1] * 1000}] * LONGEST}),
        (CHAT, {"logit_bias": {str(token): "" for token in range(100_000)}}),
        (CHAT, {"vllm_xargs": {str(token): 1 for token in range(100_000)}}),
        (COMPLETION, {"prompt": [["x"] * LONGEST] * 100}),
    ],
)
async def test_body_with_many_errors_reports_few(
    served: tuple[httpx.AsyncClient, InferenceEngine], path: str, body: dict[str, Any]
) -> None:
    """Bug: half a million errors were formatted one by one, and no other request was served for nine seconds."""
    http, engine = served
    document = chat(**body) if path == CHAT else completion(**body)
    assert (await http.post(path, json=document)).status_code == 400
    with pytest.raises(ValidationError) as raised:
        (openai_requests.ChatRequest if path == CHAT else openai_requests.CompletionRequest).model_validate(document)
    assert raised.value.error_count() < 10
    assert not engine.has_work


async def test_more_prompts_than_allowed_are_refused(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    """Bug: three thousand prompts blocked the service for minutes."""
    http, engine = served
    error = (await http.post(COMPLETION, json=completion(prompt=[[1]] * 129))).json()["error"]
    assert (error["code"], error["param"]) == (400, "prompt")
    assert not engine.has_work


async def test_chat_template_variables_are_accepted(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    http, _ = served
    answer = await http.post(CHAT, json=chat(chat_template_kwargs={"enable_thinking": False}))
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"seed": 2**70}, "seed"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": ""}, "stop"),
        ({"stop": [str(number) for number in range(65)]}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": [str(number) for number in range(4096)]}, "stop"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection"),
        ({"chat_template": "mine"}, "chat_template"),
        (
            {"chat_template_kwargs": {"chat_template": "{% for a in range(99999) %}{% endfor %}"}},
            "chat_template_kwargs",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "4", "tool_call_id": "a"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "w" * 300}]}, "messages"),
        ({"n": True}, "n"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": True}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"top_p": True}, "top_p"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "hi"}] * (LONGEST + 1)}, "messages"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]}, "messages"),
    ],
)
async def test_unsupported_field_is_a_400_naming_it(
    served: tuple[httpx.AsyncClient, InferenceEngine], fields: dict[str, Any], param: str | None
) -> None:
    http, engine = served
    answer = await http.post(CHAT, json=chat(**fields))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] in ("BadRequestError", WRONG_TYPE)
    assert (error["param"], error["code"]) == (param, 400)
    assert not engine.has_work


async def test_message_of_another_server_is_accepted(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    """Empty fields, as OpenAI's library sends them, are ignored."""
    http, _ = served
    empty_fields: dict[str, Any] = {"tool_calls": None, "refusal": None, "annotations": []}
    reply = {"role": "assistant", "content": "ho", "name": "a", **empty_fields}
    answer = await http.post(CHAT, json=chat(messages=[{"role": "user", "content": "hi"}, reply]))
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"max_tokens": "many"}, WRONG_TYPE), ({"max_tokens": -5}, "BadRequestError"), ({"prompt": [-1]}, WRONG_TYPE),
        ({"prompt": [VOCABULARY]}, "BadRequestError"), ({"vllm_xargs": [1]}, WRONG_TYPE),
    ],
)  # fmt: skip
async def test_field_of_wrong_type_has_vllms_error_type(
    served: tuple[httpx.AsyncClient, InferenceEngine], fields: dict[str, Any], kind: str
) -> None:
    """`tests/engine` compares both backends on every bad request that is recorded."""
    http, _ = served
    assert (await http.post(COMPLETION, json=completion(**fields))).json()["error"]["type"] == kind


@pytest.mark.parametrize("prompt", [[VOCABULARY], [-1], [], "", [True], [1.0], [[True]], 5, [1] * LONGEST])
async def test_invalid_prompt_is_a_400(served: tuple[httpx.AsyncClient, InferenceEngine], prompt: Any) -> None:
    http, _ = served
    answer = await http.post(COMPLETION, json=completion(prompt=prompt))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


async def test_image_part_is_refused_with_its_location(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    """Bug: the message said that a string was needed, but a list of texts is allowed."""
    http, _ = served
    image = {"type": "image_url", "image_url": {"url": "x"}}
    body = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, image]}])
    error = (await http.post(CHAT, json=body)).json()["error"]
    assert error["message"].startswith("messages.0.content.1.type: Input should be 'text'")
    assert (error["type"], error["param"]) == ("BadRequestError", "messages")


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [("GET", COMPLETION, "MethodNotAllowedError"), ("GET", "/v1/responses/5", "NotFoundError")],
)
async def test_unknown_route_answers_with_an_openai_error(
    served: tuple[httpx.AsyncClient, InferenceEngine], method: str, path: str, kind: str
) -> None:
    """Clients of the OpenAI API read `error`."""
    http, _ = served
    answer = await http.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (error["code"], kind)
    assert ("allow" in answer.headers) == (answer.status_code == 405)


async def test_other_model_is_a_404_and_own_is_listed(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    http, _ = served
    assert (await http.post(CHAT, json=chat(model="gpt-5"))).json()["error"]["type"] == "NotFoundError"
    assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == [MODEL]
    assert (await http.get("/health")).status_code == 200


async def test_model_answers_to_each_of_its_names(folder: Path) -> None:
    """Clients keep the name of the model that they used before."""
    client = Client(make_harness(folder).engine)
    service = ApiService(MODEL, Text(folder, VOCABULARY), VOCABULARY, LONGEST, client, ("gpt-4o-mini", MODEL))
    gate = RequestGate(make_app(service), lambda: GateFacts(slo_classes=(), draining=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://pod") as http:
        for name in (MODEL, "gpt-4o-mini"):
            answer = await http.post(CHAT, json=chat(model=name))
            assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == [MODEL, "gpt-4o-mini"]
    client.stop()


async def test_client_that_leaves_frees_its_memory(folder: Path) -> None:
    client = Client(make_harness(folder).engine)
    service = ApiService(MODEL, Text(folder, VOCABULARY), VOCABULARY, LONGEST, client)
    body, prompts = service.completion(completion(max_tokens=150))
    stream = client.answers(service.requests(body, "r", prompts), {})
    await anext(stream)
    await stream.aclose()
    engine = client._thread._engine
    async with asyncio.timeout(20):
        while engine.has_work:
            await asyncio.sleep(0.01)
    assert engine.free_kv_bytes == engine._pool.total_bytes
    client.stop()


async def test_engine_that_raises_ends_answers_with_an_error(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    http, engine = served

    def broken() -> Any:
        raise RuntimeError("planted")

    engine.step = broken  # type: ignore[method-assign]
    answer = await http.post(CHAT, json=chat())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
    assert (await http.get("/health")).status_code == 503
