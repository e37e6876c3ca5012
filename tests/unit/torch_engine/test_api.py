"""The OpenAI API over an engine with a tiny model: what is served, what is refused, and by which field."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from outrider_runtime.server.gate import GateFacts, RequestGate
from outrider_runtime.torch_engine import app, openai_requests
from outrider_runtime.torch_engine.app import ApiService, make_app
from outrider_runtime.torch_engine.inference_engine import InferenceEngine
from outrider_runtime.torch_engine.openai_requests import WRONG_TYPE
from outrider_runtime.torch_engine.text import Text
from outrider_runtime.torch_engine.thread import Client
from pydantic import ValidationError

from tests.unit.torch_engine.engines import LONGEST, bench
from tests.unit.torch_engine.models import VOCABULARY

MODEL = "tiny"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, InferenceEngine]]:
    engine = bench(folder).engine
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


async def test_a_stream_holds_what_the_whole_answer_holds(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    http, _ = served
    whole = (await http.post(CHAT, json=chat(ignore_eos=True))).json()
    parts = await events(http, CHAT, chat(ignore_eos=True, stream=True, stream_options={"include_usage": True}))
    assert whole["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
    choice = whole["choices"][0]
    assert len(choice["message"]["content"]) == 6
    assert choice["finish_reason"] == "length"
    deltas = [part["choices"][0] for part in parts if part["choices"]]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert "".join(one["delta"].get("content") or "" for one in deltas) == choice["message"]["content"]
    assert [one["finish_reason"] for one in deltas if one.get("finish_reason")] == ["length"]
    assert parts[-1]["usage"] == whole["usage"]


async def test_a_stop_string_ends_the_answer_and_is_not_in_it(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    """Its beginning is held back from the stream; tokens after it are not in the usage."""
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


async def test_stop_tokens_and_the_models_own_end_an_answer(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    http, _ = served
    plain = (await http.post(COMPLETION, json=completion(logprobs=0))).json()["choices"][0]
    token = ord(plain["text"][2]) - 32
    first = plain["text"].index(plain["text"][2])
    cut = (await http.post(COMPLETION, json=completion(stop_token_ids=[token]))).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (plain["text"][:first], "stop", token)
    ended = completion(ignore_eos=False, logit_bias={"0": 100})
    choice = (await http.post(COMPLETION, json=ended)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)


async def test_several_prompts_are_several_choices_of_one_answer(
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


async def test_prompts_of_one_request_are_drawn_apart_unless_it_names_a_seed(folder: Path) -> None:
    """Bug: with one seed for all, the same prompt twice had the same answer twice."""
    service = ApiService(MODEL, Text(folder, VOCABULARY), VOCABULARY, LONGEST, Mock())
    for seed, distinct in ((None, 3), (7, 1)):
        ask, prompts = service.completion(completion(prompt=["abc"] * 3, seed=seed))
        drawn = [one.sampling.seed for one in service.requests(ask, "r", prompts)]
        assert len({*drawn}) == distinct


async def test_logprobs_are_told_as_each_endpoint_has_them(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    http, _ = served
    told = (await http.post(CHAT, json=chat(temperature=0, logprobs=True, top_logprobs=2))).json()
    content = told["choices"][0]["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in content] == [2] * len(content)
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in content)
    own = (await http.post(COMPLETION, json=completion(logprobs=2))).json()["choices"][0]
    assert own["logprobs"]["tokens"] == list(own["text"])
    assert [len(one) for one in own["logprobs"]["top_logprobs"]] == [2] * 6


@pytest.mark.parametrize("most", [0, 1])
async def test_a_completions_logprobs_name_the_drawn_token_too(
    served: tuple[httpx.AsyncClient, InferenceEngine], most: int
) -> None:
    """As vLLM's do, where it is not among the most probable ones: it was missing."""
    http, _ = served
    body = completion(logprobs=most, temperature=2.0, seed=3, max_tokens=20)
    told = (await http.post(COMPLETION, json=body)).json()["choices"][0]["logprobs"]
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert len(top) <= most + 1
    assert max(len(top) for top in told["top_logprobs"]) == most + 1


async def test_a_stream_tells_where_each_token_stands_in_the_whole_text(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    """Bug: every event began at 0 again."""
    http, _ = served
    body = completion(logprobs=0, prompt=["abc", "xyz"])
    wanted = [
        choice["logprobs"]["text_offset"] for choice in (await http.post(COMPLETION, json=body)).json()["choices"]
    ]
    assert wanted == [list(range(6))] * 2
    told: list[list[int]] = [[], []]
    for part in await events(http, COMPLETION, {**body, "stream": True}):
        for choice in part["choices"]:
            told[choice["index"]] += choice["logprobs"]["text_offset"]
    assert told == wanted


async def test_a_temperature_of_next_to_nothing_is_greedy(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    """Bug: logits divided by 1e-310 were infinite, and the first of those tokens was drawn."""
    http, _ = served
    texts = {
        (await http.post(COMPLETION, json=completion(temperature=one))).json()["choices"][0]["text"]
        for one in (0, 1e-310, 1e-6)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_repetition_penalty_of_next_to_nothing_only_repeats(
    served: tuple[httpx.AsyncClient, InferenceEngine], temperature: float
) -> None:
    """Bug: its inverse is beyond a float, and the engine died of it."""
    http, _ = served
    body = completion(repetition_penalty=1e-300, temperature=temperature, prompt=[5, 5, 5], logit_bias={"5": 100})
    answer = await http.post(COMPLETION, json=body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "%" * 6


async def test_a_prompt_may_leave_room_for_one_token(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    http, _ = served
    body = completion(prompt=[5] * (LONGEST - 1), max_tokens=None)
    assert (await http.post(COMPLETION, json=body)).json()["usage"]["completion_tokens"] == 1
    full = await http.post(COMPLETION, json={**body, "prompt": [5] * LONGEST})
    assert full.status_code == 400
    assert f"maximum context length is {LONGEST} tokens" in full.json()["error"]["message"]


async def test_a_stream_with_a_stop_string_tells_logprobs_of_every_token(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    """Those whose text is held back too, and as many as the usage counts."""
    http, _ = served
    plain = (await http.post(COMPLETION, json=completion(max_tokens=12))).json()["choices"][0]["text"]
    body = completion(max_tokens=12, logprobs=1, stop=plain[5:9])
    whole = (await http.post(COMPLETION, json=body)).json()
    told = whole["choices"][0]["logprobs"]["tokens"]
    assert len(told) == whole["usage"]["completion_tokens"]
    parts = await events(http, COMPLETION, {**body, "stream": True})
    streamed = [one["choices"][0]["logprobs"] for one in parts if one["choices"][0]["logprobs"]]
    assert [token for one in streamed for token in one["tokens"]] == told
    assert "".join(one["choices"][0]["text"] for one in parts) == whole["choices"][0]["text"]


async def test_texts_are_read_beside_the_event_loop(
    served: tuple[httpx.AsyncClient, InferenceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a text of many megabytes kept all answers and probes waiting."""
    http, _ = served
    threads, encode = set[threading.Thread](), Text.encode

    def noted(self: Text, text: str, *, special: bool = True) -> list[int]:
        threads.add(threading.current_thread())
        return encode(self, text, special=special)

    monkeypatch.setattr(Text, "encode", noted)
    await http.post(COMPLETION, json=completion())
    await http.post(CHAT, json=chat())
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("prompt", ["w" * 5000, ["a", "w" * 5000], [1] * (LONGEST + 1), [[1] * (LONGEST + 1)]])
async def test_a_prompt_that_cannot_fit_is_refused_before_anything_walks_it(
    served: tuple[httpx.AsyncClient, InferenceEngine], monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    """Bug: ten million tokens stalled answers and probes for most of a minute. A token has at most 5
    characters."""
    http, _ = served
    walked = Mock()
    for name in ("parse", "check_tokens"):
        monkeypatch.setattr(app, name, walked)
    monkeypatch.setattr(Text, "encode", walked)
    error = (await http.post(COMPLETION, json=completion(prompt=prompt))).json()["error"]
    assert (error["code"], error["param"]) == (400, "prompt")
    assert f"maximum context length is {LONGEST} tokens" in error["message"]
    walked.assert_not_called()


async def test_a_chat_that_cannot_fit_is_refused_before_it_is_tokens(
    served: tuple[httpx.AsyncClient, InferenceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    http, _ = served
    encode = Mock()
    monkeypatch.setattr(Text, "encode", encode)
    error = (await http.post(CHAT, json=chat(messages=[{"role": "user", "content": "w" * 5000}]))).json()["error"]
    assert (error["code"], error["param"]) == (400, "messages")
    encode.assert_not_called()


async def test_bodies_are_parsed_beside_the_event_loop_and_once(
    served: tuple[httpx.AsyncClient, InferenceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a body of many megabytes kept all answers and probes waiting, twice."""
    http, _ = served
    threads, loads = list[threading.Thread](), json.loads

    def noted(*arguments: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return loads(*arguments, **named)

    bodies = [(COMPLETION, json.dumps(completion())), (CHAT, json.dumps(chat()))]
    monkeypatch.setattr(json, "loads", noted)
    answers = [await http.post(path, content=body) for path, body in bodies]
    assert [one.status_code for one in answers] == [200, 200]
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
async def test_of_a_body_of_errors_few_are_written_down(
    served: tuple[httpx.AsyncClient, InferenceEngine], path: str, body: dict[str, Any]
) -> None:
    """Bug: each of half a million errors was written down, for nine seconds in which nobody else was served."""
    http, engine = served
    ask = chat(**body) if path == CHAT else completion(**body)
    assert (await http.post(path, json=ask)).status_code == 400
    with pytest.raises(ValidationError) as told:
        (openai_requests.ChatRequest if path == CHAT else openai_requests.CompletionRequest).model_validate(ask)
    assert told.value.error_count() < 10
    assert not engine.has_work


async def test_more_prompts_than_choices_are_refused(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    """Bug: three thousand held the service for minutes."""
    http, engine = served
    error = (await http.post(COMPLETION, json=completion(prompt=[[1]] * 129))).json()["error"]
    assert (error["code"], error["param"]) == (400, "prompt")
    assert not engine.has_work


async def test_variables_reach_the_chat_template(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
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
async def test_what_is_not_served_is_a_400_that_names_the_field(
    served: tuple[httpx.AsyncClient, InferenceEngine], fields: dict[str, Any], param: str | None
) -> None:
    http, engine = served
    answer = await http.post(CHAT, json=chat(**fields))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] in ("BadRequestError", WRONG_TYPE)
    assert (error["param"], error["code"]) == (param, 400)
    assert not engine.has_work


async def test_a_message_comes_back_as_another_server_gave_it(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    """With fields that say nothing, as OpenAI's library sends them."""
    http, _ = served
    nothing: dict[str, Any] = {"tool_calls": None, "refusal": None, "annotations": []}
    said = {"role": "assistant", "content": "ho", "name": "a", **nothing}
    answer = await http.post(CHAT, json=chat(messages=[{"role": "user", "content": "hi"}, said]))
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"max_tokens": "many"}, WRONG_TYPE), ({"max_tokens": -5}, "BadRequestError"), ({"prompt": [-1]}, WRONG_TYPE),
        ({"prompt": [VOCABULARY]}, "BadRequestError"), ({"vllm_xargs": [1]}, WRONG_TYPE),
    ],
)  # fmt: skip
async def test_a_field_of_another_type_has_vllms_error_type(
    served: tuple[httpx.AsyncClient, InferenceEngine], fields: dict[str, Any], kind: str
) -> None:
    """`tests/engine` compares both backends on every bad request that is recorded."""
    http, _ = served
    assert (await http.post(COMPLETION, json=completion(**fields))).json()["error"]["type"] == kind


@pytest.mark.parametrize("prompt", [[VOCABULARY], [-1], [], "", [True], [1.0], [[True]], 5, [1] * LONGEST])
async def test_a_prompt_that_is_none_is_a_400(served: tuple[httpx.AsyncClient, InferenceEngine], prompt: Any) -> None:
    http, _ = served
    answer = await http.post(COMPLETION, json=completion(prompt=prompt))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


async def test_a_part_that_is_no_text_is_named_by_its_place(served: tuple[httpx.AsyncClient, InferenceEngine]) -> None:
    """Bug: the sentence asked for a string, which a list of texts need not be."""
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
async def test_routes_that_are_not_there_answer_as_all_refusals(
    served: tuple[httpx.AsyncClient, InferenceEngine], method: str, path: str, kind: str
) -> None:
    """Clients of the OpenAI API read `error`."""
    http, _ = served
    answer = await http.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (error["code"], kind)
    assert ("allow" in answer.headers) == (answer.status_code == 405)


async def test_another_model_is_a_404_and_the_own_one_is_listed(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    http, _ = served
    assert (await http.post(CHAT, json=chat(model="gpt-5"))).json()["error"]["type"] == "NotFoundError"
    assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == [MODEL]
    assert (await http.get("/health")).status_code == 200


async def test_model_answers_to_each_of_its_names(folder: Path) -> None:
    """Clients keep the name of the model that they used before."""
    client = Client(bench(folder).engine)
    service = Service(MODEL, Text(folder, VOCABULARY), VOCABULARY, LONGEST, client, ("gpt-4o-mini", MODEL))
    gate = RequestGate(make_app(service), lambda: GateFacts(slo_classes=(), draining=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://pod") as http:
        for name in (MODEL, "gpt-4o-mini"):
            answer = await http.post(CHAT, json=chat(model=name))
            assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == [MODEL, "gpt-4o-mini"]
    client.stop()


async def test_what_a_client_that_left_held_is_free(folder: Path) -> None:
    client = Client(bench(folder).engine)
    service = ApiService(MODEL, Text(folder, VOCABULARY), VOCABULARY, LONGEST, client)
    ask, prompts = service.completion(completion(max_tokens=150))
    stream = client.answers(service.requests(ask, "r", prompts), {})
    await anext(stream)
    await stream.aclose()
    held = client._thread._engine
    async with asyncio.timeout(20):
        while held.has_work:
            await asyncio.sleep(0.01)
    assert held.free_kv_bytes == held._pool.total_bytes
    client.stop()


async def test_an_engine_that_raises_ends_every_answer_with_an_error(
    served: tuple[httpx.AsyncClient, InferenceEngine],
) -> None:
    http, engine = served

    def broken() -> Any:
        raise RuntimeError("planted")

    engine.step = broken  # type: ignore[method-assign]
    answer = await http.post(CHAT, json=chat())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
    assert (await http.get("/health")).status_code == 503
