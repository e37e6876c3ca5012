"""The fields of the OpenAI API that this engine serves. A request that uses another is refused, naming the field."""

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
    "return_weight_versions": (False,),
    "repetition_detection": (),
    "thinking_token_budget": (), "reasoning_effort": (),
    "watermarking": (False,), "kv_transfer_params": (), "ec_transfer_params": (),
    "media_io_kwargs": ({},), "mm_processor_kwargs": ({},),
}  # fmt: skip
"""Fields that other servers have and this one lacks, and the values that change nothing and are therefore accepted."""
MAX_LOGPROBS = 20
NOT_SERVED = "is not served by this service's engine (Torch); remove it"
MAX_ENTRIES = 1024
"""Entries of any list or object other than a prompt: as many as the biases that vLLM's sampler has room for."""
WRONG_TYPE = "Bad Request"
"""vLLM's error type for a field that is missing or has the wrong type."""
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
"""Validation stops at the first bad item; otherwise a list of a million would yield a million errors."""
_Request = TypeVar("_Request", bound="GenerationRequest")
NOT_IN_MESSAGES = ("tool_calls", "tool_call_id", "function_call", "reasoning", "reasoning_content", "audio")
"""Fields of a message that a chat template could read and that this engine does not pass to it."""


class StreamOptions(BaseModel):
    """The field `stream_options`."""

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
    """The fields that both endpoints have."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)
    PROMPT: ClassVar[str]
    """Name of the field that holds the prompt."""

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
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_ENTRIES)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_ENTRIES)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    vllm_xargs: dict[str, str | float] | None = None

    @field_validator("logit_bias", "vllm_xargs", mode="before")
    @classmethod
    def _limit_entries(cls, value: Any) -> Any:
        """Limit the entries before they are validated, since each may yield an error."""
        if isinstance(value, Mapping) and len(value) > MAX_ENTRIES:
            raise ValueError(f"it has {len(value)} entries; {MAX_ENTRIES} are allowed")
        return value

    @field_validator("stream_options")
    @classmethod
    def _only_in_streams(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("allowed only with stream: true")
        return value

    @property
    def extra_args(self) -> dict[str, object]:
        """Arguments beyond OpenAI's fields: they may name the request's SLO class or its own SLO."""
        return dict(self.vllm_xargs or {})

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens of the answer; None: as many as there is room for."""
        return self.max_tokens

    @property
    def top_tokens(self) -> int | None:
        """Most probable tokens to report with each token; None: report no log-probabilities."""
        raise NotImplementedError


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    PROMPT = "prompt"
    prompt: str | Tokens | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Tokens], Field(fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    @property
    def top_tokens(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts: `prompt` is one text, one list of tokens, or a list of either."""
        is_single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return cast(list[str] | list[list[int]], [self.prompt] if is_single else self.prompt)


class TextPart(BaseModel):
    """One part of a message's content; the engine takes text only."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat. Fields that are not named here must be empty or harmless; see NOT_IN_MESSAGES."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_ENTRIES)] | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for field in NOT_IN_MESSAGES:
            if (self.model_extra or {}).get(field):
                raise ValueError(f"{field} {NOT_SERVED}")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as chat templates read it, with its parts joined."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    PROMPT = "messages"
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("allowed only with logprobs: true")
        return value

    @property
    def answer_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def parse(kind: type[_Request], document: Mapping[str, Any]) -> _Request:
    """Validate a request's JSON. Raises RequestError (400) naming the field."""
    for field, neutral in NEUTRAL.items():
        value = document.get(field)
        if value is not None and not any(type(value) is type(item) and value == item for item in neutral):
            raise RequestError(f"{field} {NOT_SERVED}", field)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        # When a field allows several types, report the error of the one that matched furthest.
        problems = error.errors(include_url=False, include_input=False)
        problem = max(problems, key=lambda candidate: len(candidate["loc"]))
        is_wrong_type = problem["type"] == "missing" or problem["type"].endswith("_type")
        sentence = f"{_path(problem['loc'])}: {problem['msg']}"
        raise RequestError(sentence, str(problem["loc"][0]), kind=WRONG_TYPE if is_wrong_type else "") from None


def _path(location: Sequence[str | int]) -> str:
    """Join a field's location with dots, without pydantic's names of the types that it tried."""
    steps = [str(step) for step in location if isinstance(step, int) or (step.isidentifier() and step != "str")]
    return ".".join(steps)[:80]
