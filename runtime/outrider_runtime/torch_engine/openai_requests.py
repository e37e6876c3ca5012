"""What a request of the OpenAI API may ask here; the rest is refused by the field's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from outrider_runtime.server.server_errors import RequestError

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
    "thinking_token_budget": (), "reasoning_effort": (),
    "watermarking": (False,), "kv_transfer_params": (), "ec_transfer_params": (),
    "media_io_kwargs": ({},), "mm_processor_kwargs": ({},),
}  # fmt: skip
"""Fields that other servers have and this one does not, and the values that ask for nothing."""
MOST_LOGPROBS = 20
NOT_SERVED = "is not served by this service's engine (Torch); remove it"
MOST_ENTRIES = 1024
"""Of a field that is no prompt; vLLM's sampler has room for as many biases."""
MISSHAPEN = "Bad Request"
"""vLLM's error type for a field that is missing, or of another type than it should be."""
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
"""A list ends at its first bad item: of a million, each would have an error of its own."""
_Request = TypeVar("_Request", bound="GenerationRequest")
NOT_IN_MESSAGES = ("tool_calls", "tool_call_id", "function_call", "reasoning", "reasoning_content", "audio")
"""Fields of a message that a template would read, and that are not handed to it here."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @field_validator("continuous_usage_stats")
    @classmethod
    def _is_not_served(cls, value: bool) -> bool:
        if value:
            raise ValueError(f"continuous_usage_stats {NOT_SERVED}")
        return value


class GenerationRequest(BaseModel):
    """Fields of both endpoints."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)
    PROMPT: ClassVar[str]
    """The field that the prompt is made of."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MOST_ENTRIES)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MOST_ENTRIES)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    vllm_xargs: dict[str, str | float] | None = None

    @field_validator("logit_bias", "vllm_xargs", mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        """Before its entries are looked at: each may have an error of its own."""
        if isinstance(value, Mapping) and len(value) > MOST_ENTRIES:
            raise ValueError(f"it has {len(value)} entries; {MOST_ENTRIES} are allowed")
        return value

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("only a request with stream: true has some")
        return value

    @property
    def extra_args(self) -> dict[str, object]:
        """The request's class, or its own SLO."""
        return dict(self.vllm_xargs or {})

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


class CompletionRequest(GenerationRequest):
    PROMPT = "prompt"
    prompt: str | Tokens | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Tokens], Field(fail_fast=True)]
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


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_ENTRIES)] | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for field in NOT_IN_MESSAGES:
            if (self.model_extra or {}).get(field):
                raise ValueError(f"{field} {NOT_SERVED}")
        return self

    def plain(self) -> dict[str, Any]:
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class ChatRequest(GenerationRequest):
    PROMPT = "messages"
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
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


def parse(kind: type[_Request], document: Mapping[str, Any]) -> _Request:
    """Raises RequestError (400) that names the field."""
    for field, neutral in NEUTRAL.items():
        value = document.get(field)
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            raise RequestError(f"{field} {NOT_SERVED}", field)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        # Where several shapes are allowed, the one that fits furthest is the one that was meant.
        problem = max(error.errors(include_url=False, include_input=False), key=lambda one: len(one["loc"]))
        is_misshapen = problem["type"] == "missing" or problem["type"].endswith("_type")
        sentence = f"{_path(problem['loc'])}: {problem['msg']}"
        raise RequestError(sentence, str(problem["loc"][0]), kind=MISSHAPEN if is_misshapen else "") from None


def _path(place: Sequence[str | int]) -> str:
    """Without pydantic's names of the shapes that were tried."""
    steps = [str(one) for one in place if isinstance(one, int) or (one.isidentifier() and one != "str")]
    return ".".join(steps)[:80]
