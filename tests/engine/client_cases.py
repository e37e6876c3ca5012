"""What clients send, good and bad, to whichever server: ours, vLLM's own with Outrider in it, the Torch backend's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.engine.server_process import REPETITIVE, Server

MODEL = "smollm2-135m-instruct"


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


def stream_token_by_token(server: Server) -> None:
    """Nothing between engine and client buffers."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count to ten."}],
        "max_tokens": 96,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"X-SLO-Class": "batch"}
    with server.api.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    pieces = [json.loads(event[6:])["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert sum(1 for piece in pieces if piece) >= 3


def just_fit_the_sampler(fields: dict[str, Any], server: Server) -> None:
    """The model has one stop token of its own; without min_tokens the sampler knows none."""
    answer = server.post("/v1/completions", _completion(**fields))
    assert answer.status_code == 200, answer.text


def stream_beyond_the_samplers_room(server: Server) -> None:
    """vLLM sends the status of a stream before it looks at the request."""
    body = _completion(stream=True, logit_bias={str(token): -1 for token in range(1025)})
    text = server.post("/v1/completions", body).text
    assert "logit_bias takes 1025 tokens, and the engine has room for 1024" in text
    assert server.chat(max_tokens=1).status_code == 200


def offer_a_tool_with_a_bound_beyond_64_bits(maximum: int, server: Server) -> None:
    """It was a 400 for every request of an agent with such a tool."""
    schema = {"type": "object", "properties": {"offset": {"type": "integer", "maximum": maximum}}}
    tools = [{"type": "function", "function": {"name": "read", "parameters": schema}}]
    answer = server.chat(tools=tools, tool_choice="none")
    assert answer.status_code == 200, answer.text


def mix_seeded_and_greedy(server: Server) -> None:
    """vLLM alone dies of this on a CPU ("CPU Generator does not use offset")."""
    answers: dict[str, httpx.Response] = {}

    def ask(name: str, **fields: Any) -> Callable[[], None]:
        def send() -> None:
            answers[name] = server.chat("Tell me a story.", max_tokens=24, **fields)

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
    assert server.chat(max_tokens=1).status_code == 200


def bind_one_of_two_to_a_grammar(server: Server) -> None:
    """Its steps are two calls to the worker, as the mask is made while the target runs; the others' are one."""
    answers: list[httpx.Response] = []
    other = threading.Thread(target=lambda: answers.append(server.chat(REPETITIVE, max_tokens=48, temperature=0)))
    other.start()
    bound = server.chat("Say 1 2 3.", max_tokens=32, temperature=0, structured_outputs={"regex": "(1 2 3 ){4}"})
    other.join()
    assert bound.json()["choices"][0]["message"]["content"].split() == ["1", "2", "3"] * 4
    assert answers[0].json()["usage"]["completion_tokens"] > 0


def hang_up(server: Server) -> None:
    """vLLM aborts the request: the disconnect reaches it."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with server.api.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: an iterator that is dropped hangs up
        next(lines)
        server.wait_until("the gauge", lambda: _running(server) == 1)  # vLLM sets it after the step
    server.wait_until("the abort", lambda: _running(server) == 0)


def _running(server: Server) -> float:
    return server.metric("vllm:num_requests_running")


JUST_FITTING: tuple[dict[str, Any], ...] = (
    {"logit_bias": {str(token): -1 for token in range(1024)}},
    {"allowed_token_ids": list(range(1024))},
    {"min_tokens": 2, "stop_token_ids": list(range(3, 130))},
    {"stop_token_ids": list(range(3, 1000))},
    {"bad_words": ["a b " * 200]},
)
GOOD: dict[str, Callable[[Server], None]] = {
    "stream": stream_token_by_token,
    "stream beyond the sampler's room": stream_beyond_the_samplers_room,
    **{f"just fitting {' '.join(fields)}": partial(just_fit_the_sampler, fields) for fields in JUST_FITTING},
    "tool bound beyond int64": partial(offer_a_tool_with_a_bound_beyond_64_bits, 9223372036854776000),
    "tool bound of uint64": partial(offer_a_tool_with_a_bound_beyond_64_bits, 2**64 - 1),
    "seeded and greedy": mix_seeded_and_greedy,
    "grammar": bind_one_of_two_to_a_grammar,
    "hang-up": hang_up,
}
"""What each server serves."""
