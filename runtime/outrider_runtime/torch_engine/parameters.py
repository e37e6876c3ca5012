"""Converts the fields of an API request into the engine's sampling parameters and stop conditions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider_runtime.server.server_errors import RequestError
from outrider_runtime.torch_engine.engine_request import Sampling, Stops
from outrider_runtime.torch_engine.openai_requests import WRONG_TYPE, GenerationRequest

MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 256
"""Stop strings of a request, and characters of each: the engine's thread, shared by all requests, searches for each of
them at every token."""
MIN_TEMPERATURE = 1e-5
"""A lower temperature counts as 0: the draw would be the most probable token, and logits / temperature may overflow a
double."""
MIN_REPETITION_PENALTY = 1e-5
"""A lower penalty is raised to this: logits / penalty may overflow a float. Even here only tokens that occurred before
are drawn."""
_UNSEEDED = random.SystemRandom()


def sampling(body: GenerationRequest, defaults: Mapping[str, float], vocabulary: int) -> Sampling:
    """Read the sampling parameters. defaults: those of the model, for fields that the request does not set."""

    def value(field: str, neutral: float) -> float:
        of_request = getattr(body, field)
        return float(defaults.get(field, neutral) if of_request is None else of_request)

    temperature = value("temperature", 1.0)
    return Sampling(
        seed=_UNSEEDED.getrandbits(63) if body.seed is None else body.seed,
        is_seeded=body.seed is not None,
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=value("top_p", 1.0),
        top_k=max(0, int(value("top_k", 0))),
        min_p=value("min_p", 0.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=max(MIN_REPETITION_PENALTY, value("repetition_penalty", 1.0)),
        logit_bias={_token(name, "logit_bias", vocabulary): bias for name, bias in (body.logit_bias or {}).items()},
        logprobs=body.top_tokens,
    )


def with_own_seed(shared: Sampling) -> Sampling:
    """Copy the parameters for one of a request's prompts: with its own random seed, unless the user named one."""
    return shared if shared.is_seeded else replace(shared, seed=_UNSEEDED.getrandbits(63))


def stops(body: GenerationRequest, end_tokens: frozenset[int], prompt: int, longest: int) -> Stops:
    """Read the stop conditions. Raises RequestError (400) when there is no room for the answer.

    prompt: tokens of the prompt. longest: tokens that prompt and answer may have together.
    """
    return Stops(
        _max_tokens(body, prompt, longest), frozenset() if body.ignore_eos else end_tokens,
        frozenset(body.stop_token_ids or ()), _stop_strings(body.stop),
    )  # fmt: skip


def _max_tokens(body: GenerationRequest, prompt: int, longest: int) -> int:
    """Tokens that the answer may have: as many as the request names, otherwise all that fit."""
    requested = body.answer_tokens
    room = longest - prompt
    if prompt < 1:
        raise RequestError("the prompt is empty", "prompt")
    if room < 1 or (requested or 0) > room:
        problem = f"asks for {requested} tokens" if requested else "leaves no room for an answer"
        raise RequestError(
            f"this model's maximum context length is {longest} tokens; "
            f"the prompt has {prompt} and the request {problem}",
            "max_tokens" if room >= 1 else body.PROMPT,
        )
    return requested or room


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if "" in strings:
        raise RequestError("stop cannot contain an empty string", "stop")
    if len(strings) > MAX_STOP_STRINGS or any(len(string) > MAX_STOP_CHARACTERS for string in strings):
        sentence = f"stop takes at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_CHARACTERS} characters"
        raise RequestError(sentence, "stop")
    return tuple(strings)


def check_tokens(tokens: Sequence[int], field: str, vocabulary: int) -> None:
    """Check that tokens are in the vocabulary. Raises RequestError (400)."""
    for token in tokens:
        _token(token, field, vocabulary)


def _token(name: str | int, field: str, vocabulary: int) -> int:
    """Read a token number. Raises RequestError (400) when it is not in the vocabulary."""
    try:
        token = int(name)
    except ValueError:
        raise RequestError(f"{field}: {name!r} is not a token number", field) from None
    if not 0 <= token < vocabulary:
        kind = WRONG_TYPE if token < 0 and field == "prompt" else ""
        raise RequestError(f"{field}: the token {token} is not in the vocabulary of {vocabulary}", field, kind=kind)
    return token
