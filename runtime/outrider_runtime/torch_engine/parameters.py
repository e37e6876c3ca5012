"""What the fields of a request mean to the engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider_runtime.server.server_errors import RequestError
from outrider_runtime.torch_engine.engine_request import Sampling, Stops
from outrider_runtime.torch_engine.openai_requests import MISSHAPEN, GenerationRequest

MOST_STOPS, LONGEST_STOP = 64, 256
"""Stop strings, and characters of one: each is looked for at every token, on the thread that all requests share."""
LEAST_TEMPERATURE = 1e-5
"""Below it a draw is the most probable token, and logits divided by it may be beyond a double."""
LEAST_REPETITION_PENALTY = 1e-5
"""Below it logits divided by it may be beyond a float; at it nothing is drawn that was not there before."""
_UNSEEDED = random.SystemRandom()


def sampling(ask: GenerationRequest, defaults: Mapping[str, float], vocabulary: int) -> Sampling:
    """defaults: of the model's makers."""

    def chosen(field: str, otherwise: float) -> float:
        own, makers = getattr(ask, field), defaults.get(field)
        return float(own if own is not None else otherwise if makers is None else makers)

    temperature = chosen("temperature", 1.0)
    return Sampling(
        seed=_UNSEEDED.getrandbits(63) if ask.seed is None else ask.seed,
        is_seeded=ask.seed is not None,
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_p=chosen("top_p", 1.0),
        top_k=max(0, int(chosen("top_k", 0))),
        min_p=chosen("min_p", 0.0),
        presence_penalty=ask.presence_penalty or 0.0,
        frequency_penalty=ask.frequency_penalty or 0.0,
        repetition_penalty=max(LEAST_REPETITION_PENALTY, chosen("repetition_penalty", 1.0)),
        logit_bias={_token(name, "logit_bias", vocabulary): bias for name, bias in (ask.logit_bias or {}).items()},
        logprobs=ask.top,
    )


def drawn_apart(drawn: Sampling) -> Sampling:
    """Of one prompt among several: noise of its own, where the request names no seed."""
    return drawn if drawn.is_seeded else replace(drawn, seed=_UNSEEDED.getrandbits(63))


def stops(ask: GenerationRequest, end_tokens: frozenset[int], prompt: int, longest: int) -> Stops:
    """prompt: its tokens. Raises RequestError (400) where there is no room for the answer."""
    return Stops(
        _most_tokens(ask, prompt, longest), frozenset() if ask.ignore_eos else end_tokens,
        frozenset(ask.stop_token_ids or ()), _stop_strings(ask.stop),
    )  # fmt: skip


def _most_tokens(ask: GenerationRequest, prompt: int, longest: int) -> int:
    asked, room = ask.most_tokens, longest - prompt
    if prompt < 1:
        raise RequestError("the prompt is empty", "prompt")
    if room < 1 or (asked or 0) > room:
        asks = f"asks for {asked} tokens" if asked else "leaves no room for an answer"
        raise RequestError(
            f"this model's maximum context length is {longest} tokens; the prompt has {prompt} and the request {asks}",
            "max_tokens" if room >= 1 else ask.PROMPT,
        )
    return asked or room


def _stop_strings(asked: str | list[str] | None) -> tuple[str, ...]:
    strings = [asked] if isinstance(asked, str) else asked or []
    if "" in strings:
        raise RequestError("stop cannot contain an empty string", "stop")
    if len(strings) > MOST_STOPS or any(len(one) > LONGEST_STOP for one in strings):
        raise RequestError(f"stop takes {MOST_STOPS} strings of {LONGEST_STOP} characters at most", "stop")
    return tuple(strings)


def check_tokens(tokens: Sequence[int], field: str, vocabulary: int) -> None:
    """Raises RequestError (400)."""
    for token in tokens:
        _token(token, field, vocabulary)


def _token(name: str | int, field: str, vocabulary: int) -> int:
    try:
        token = int(name)
    except ValueError:
        raise RequestError(f"{field}: {name!r} is not a token", field) from None
    if not 0 <= token < vocabulary:
        kind = MISSHAPEN if token < 0 and field == "prompt" else ""
        raise RequestError(f"{field}: the token {token} is not in the vocabulary of {vocabulary}", field, kind=kind)
    return token
