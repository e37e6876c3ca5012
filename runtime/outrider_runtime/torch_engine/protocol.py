"""What a request of the OpenAI API may ask here, and what that means; the rest is refused by the field's name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from outrider_runtime.server.errors import RequestError
from outrider_runtime.torch_engine.requests import Sampling, Stops

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "structured_outputs": (),
    "echo": (False,), "suffix": ("",), "use_beam_search": (False,), "min_tokens": (0,), "prompt_logprobs": (),
    "allowed_token_ids": (), "bad_words": ([],), "include_stop_str_in_output": (False,), "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "logits_processors": ([],),
    "prompt_embeds": (), "modalities": (["text"],), "audio": (), "priority": (0,), "continue_final_message": (False,),
    "chat_template": (), "documents": ([],),
    "truncation_side": (), "logprob_token_ids": (), "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,), "return_token_offsets": (False,), "return_prompt_text": (False,),
    "repetition_detection": (),
    "thinking_token_budget": (), "watermarking": (False,), "kv_transfer_params": (), "ec_transfer_params": (),
    "media_io_kwargs": ({},), "mm_processor_kwargs": ({},),
}  # fmt: skip
"""Fields that other servers have and this one does not, and the values that ask for nothing."""
MOST_LOGPROBS = 20
MOST_STOPS, LONGEST_STOP = 64, 256
"""Stop strings, and characters of one: each is looked for at every token, on the thread that all requests share."""
LEAST_TEMPERATURE = 1e-5
"""Below it a draw is the most probable token, and logits divided by it may be beyond a double."""
LEAST_REPETITION_PENALTY = 1e-5
"""Below it logits divided by it may be beyond a float; at it nothing is drawn that was not there before."""
MISSHAPEN = "Bad Request"
"""vLLM's error type for a field that is missing, or of another type than it should be."""
_UNSEEDED = random.SystemRandom()
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Ask = TypeVar("_Ask", bound="Ask")


class StreamOptions(BaseModel):
    include_usage: bool = False


class Ask(BaseModel):
    """Fields of both endpoints."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    vllm_xargs: dict[str, str] | None = None

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("only a request with stream: true has some")
        return value

    @property
    def slo_class(self) -> str | None:
        return (self.vllm_xargs or {}).get("slo_class")

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def most_tokens(self) -> int | None:
        """None: as many as there is room for."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Most probable tokens to tell of."""
        raise NotImplementedError


class Completion(Ask):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return cast(list[str] | list[list[int]], [self.prompt] if is_one else self.prompt)


class Part(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Annotated[str, Field(min_length=1)]
    content: str | list[Part] | None = None

    def plain(self) -> dict[str, Any]:
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        return {"role": self.role, "content": text}


class Chat(Ask):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("only a request with logprobs: true has some")
        return value

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def parse(kind: type[_Ask], document: Mapping[str, Any]) -> _Ask:
    """Raises RequestError (400) that names the field."""
    for field, neutral in NEUTRAL.items():
        value = document.get(field)
        if value is not None and value not in neutral:
            raise RequestError(f"{field} is not served by this service's engine (Torch); remove it", field)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = str(problem["loc"][0]) if problem["loc"] else "body"
        is_misshapen = problem["type"] == "missing" or problem["type"].endswith(("_type", "_parsing"))
        raise RequestError(f"{field}: {problem['msg']}", field, kind=MISSHAPEN if is_misshapen else "") from None


def sampling(ask: Ask, defaults: Mapping[str, Any], vocabulary: int) -> Sampling:
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


def stops(ask: Ask, end_tokens: frozenset[int], prompt: int, longest: int) -> Stops:
    """prompt: its tokens. Raises RequestError (400) where there is no room for the answer."""
    room = longest - prompt
    if prompt < 1:
        raise RequestError("the prompt is empty", "prompt")
    most = ask.most_tokens
    if room < 1 or (most or 0) > room:
        asked = f"asks for {most} tokens" if most else "leaves no room for an answer"
        raise RequestError(
            f"this model's maximum context length is {longest} tokens; the prompt has {prompt} and the request {asked}",
            "max_tokens" if room >= 1 else None,
        )
    strings = [ask.stop] if isinstance(ask.stop, str) else ask.stop or []
    if "" in strings:
        raise RequestError("stop cannot contain an empty string", "stop")
    if len(strings) > MOST_STOPS or any(len(one) > LONGEST_STOP for one in strings):
        raise RequestError(f"stop takes {MOST_STOPS} strings of {LONGEST_STOP} characters at most", "stop")
    return Stops(
        most or room, frozenset() if ask.ignore_eos else end_tokens, frozenset(ask.stop_token_ids or ()),
        tuple(sorted(strings)),
    )  # fmt: skip


def check_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    for token in tokens:
        _token(token, "prompt", vocabulary)


def _token(name: str | int, field: str, vocabulary: int) -> int:
    try:
        token = int(name)
    except ValueError:
        raise RequestError(f"{field}: {name!r} is not a token", field) from None
    if not 0 <= token < vocabulary:
        kind = MISSHAPEN if token < 0 and field == "prompt" else ""
        raise RequestError(f"{field}: the token {token} is not in the vocabulary of {vocabulary}", field, kind=kind)
    return token
