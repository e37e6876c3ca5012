"""Answers as the OpenAI API has them; the types are those of OpenAI's own library."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, cast

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs

from outrider_runtime.torch_engine.inference_engine import Output
from outrider_runtime.torch_engine.text import Text
from outrider_runtime.torch_engine.token_sampling import TokenLogprobs

Finish = Literal["stop", "length"]


@dataclass(slots=True)
class Piece:
    """Of one choice: a step's part of it, or all of it."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: int | str | None = None

    def add(self, output: Output) -> None:
        self.tokens += output.tokens
        self.text += output.text
        self.logprobs += output.logprobs
        self.finish = None if output.finish is None else output.finish.value
        self.stop_reason = output.stop_reason


def piece_of(output: Output) -> Piece:
    piece = Piece()
    piece.add(output)
    return piece


def usage(prompt: int, answer: int) -> CompletionUsage:
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=answer, total_tokens=prompt + answer)


@dataclass(frozen=True, slots=True)
class Chats:
    """Documents of one chat request."""

    name: str
    model: str
    text: Text
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Sequence[Piece], used: CompletionUsage) -> ChatCompletion:
        return ChatCompletion(
            id=self.name, created=self.created, model=self.model, object="chat.completion", usage=used,
            choices=[
                Choice.model_construct(
                    index=index, finish_reason=one.finish or "length", stop_reason=one.stop_reason,
                    message=ChatCompletionMessage(role="assistant", content=one.text),
                    logprobs=ChoiceLogprobs(content=self._logprobs(one)) if one.logprobs else None,
                )
                for index, one in enumerate(pieces)
            ],
        )  # fmt: skip

    def first(self) -> ChatCompletionChunk:
        return self._chunk([ChunkChoice(index=0, delta=ChoiceDelta(role="assistant", content=""))])

    def part(self, index: int, one: Piece) -> ChatCompletionChunk:
        logprobs = ChunkLogprobs(content=self._logprobs(one)) if one.logprobs else None
        return self._chunk(
            [
                ChunkChoice.model_construct(
                    index=index, delta=ChoiceDelta(content=one.text), finish_reason=one.finish, logprobs=logprobs,
                    stop_reason=one.stop_reason,
                )
            ]
        )  # fmt: skip

    def last(self, used: CompletionUsage) -> ChatCompletionChunk:
        return self._chunk([], used)

    def _chunk(self, choices: list[ChunkChoice], used: CompletionUsage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.name, created=self.created, model=self.model, object="chat.completion.chunk", choices=choices,
            usage=used,
        )  # fmt: skip

    def _logprobs(self, one: Piece) -> list[ChatCompletionTokenLogprob]:
        return [
            ChatCompletionTokenLogprob(
                **self._told(token, told.logprob),
                top_logprobs=[TopLogprob(**self._told(other, logprob)) for other, logprob in told.top.items()],
            )
            for token, told in zip(one.tokens, one.logprobs, strict=True)
        ]

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text.token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


@dataclass(frozen=True, slots=True)
class Completions:
    """Documents of one completion request."""

    name: str
    model: str
    text: Text
    created: int = field(default_factory=lambda: int(time.time()))
    _told: Counter[int] = field(default_factory=Counter)
    """Of each choice, characters of the tokens whose logprobs went out."""

    def whole(self, pieces: Sequence[Piece], used: CompletionUsage) -> Completion:
        return self._document([self._choice(index, one) for index, one in enumerate(pieces)], used)

    def first(self) -> None:
        """A stream of completions begins with text."""

    def part(self, index: int, one: Piece) -> Completion:
        return self._document([self._choice(index, one)])

    def last(self, used: CompletionUsage) -> Completion:
        return self._document([], used)

    def _document(self, choices: list[CompletionChoice], used: CompletionUsage | None = None) -> Completion:
        return Completion(
            id=self.name, created=self.created, model=self.model, object="text_completion", choices=choices, usage=used
        )

    def _choice(self, index: int, one: Piece) -> CompletionChoice:
        return CompletionChoice.model_construct(
            index=index, text=one.text, finish_reason=cast(Finish, one.finish), stop_reason=one.stop_reason,
            logprobs=self._logprobs(index, one) if one.logprobs else None,
        )  # fmt: skip

    def _logprobs(self, index: int, one: Piece) -> Logprobs:
        tokens = [self.text.token(token) for token in one.tokens]
        *offsets, self._told[index] = accumulate(map(len, tokens), initial=self._told[index])
        return Logprobs(
            tokens=tokens,
            token_logprobs=[told.logprob for told in one.logprobs],
            top_logprobs=[
                {self.text.token(token): logprob for token, logprob in [(drawn, told.logprob), *told.top.items()]}
                for drawn, told in zip(one.tokens, one.logprobs, strict=True)
            ],
            text_offset=offsets,
        )
