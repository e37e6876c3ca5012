"""Answers in the shape of the OpenAI API, built from the types of OpenAI's own library."""

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
    """Tokens and text of one choice: what one step added, or the whole choice."""

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


def make_piece(output: Output) -> Piece:
    piece = Piece()
    piece.add(output)
    return piece


def usage(prompt: int, answer: int) -> CompletionUsage:
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=answer, total_tokens=prompt + answer)


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """Builds the response bodies and stream events of one chat request."""

    name: str
    model: str
    text: Text
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Sequence[Piece], used: CompletionUsage) -> ChatCompletion:
        return ChatCompletion(
            id=self.name, created=self.created, model=self.model, object="chat.completion", usage=used,
            choices=[
                Choice.model_construct(
                    index=index, finish_reason=piece.finish or "length", stop_reason=piece.stop_reason,
                    message=ChatCompletionMessage(role="assistant", content=piece.text),
                    logprobs=ChoiceLogprobs(content=self._logprobs(piece)) if piece.logprobs else None,
                )
                for index, piece in enumerate(pieces)
            ],
        )  # fmt: skip

    def first(self) -> ChatCompletionChunk:
        return self._chunk([ChunkChoice(index=0, delta=ChoiceDelta(role="assistant", content=""))])

    def part(self, index: int, piece: Piece) -> ChatCompletionChunk:
        logprobs = ChunkLogprobs(content=self._logprobs(piece)) if piece.logprobs else None
        return self._chunk(
            [
                ChunkChoice.model_construct(
                    index=index, delta=ChoiceDelta(content=piece.text), finish_reason=piece.finish, logprobs=logprobs,
                    stop_reason=piece.stop_reason,
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

    def _logprobs(self, piece: Piece) -> list[ChatCompletionTokenLogprob]:
        return [
            ChatCompletionTokenLogprob(
                **self._token_logprob(token, entry.logprob),
                top_logprobs=[
                    TopLogprob(**self._token_logprob(other, logprob)) for other, logprob in entry.top.items()
                ],
            )
            for token, entry in zip(piece.tokens, piece.logprobs, strict=True)
        ]

    def _token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text.token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


@dataclass(frozen=True, slots=True)
class CompletionAnswers:
    """Builds the response bodies and stream events of one completion request."""

    name: str
    model: str
    text: Text
    created: int = field(default_factory=lambda: int(time.time()))
    _reported_characters: Counter[int] = field(default_factory=Counter)
    """Choice index -> characters of the tokens whose logprobs were sent: the next token's `text_offset`."""

    def whole(self, pieces: Sequence[Piece], used: CompletionUsage) -> Completion:
        return self._document([self._choice(index, piece) for index, piece in enumerate(pieces)], used)

    def first(self) -> None:
        """Return no event: unlike a chat, a stream of completions begins with text."""

    def part(self, index: int, piece: Piece) -> Completion:
        return self._document([self._choice(index, piece)])

    def last(self, used: CompletionUsage) -> Completion:
        return self._document([], used)

    def _document(self, choices: list[CompletionChoice], used: CompletionUsage | None = None) -> Completion:
        return Completion(
            id=self.name, created=self.created, model=self.model, object="text_completion", choices=choices, usage=used
        )

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        return CompletionChoice.model_construct(
            index=index, text=piece.text, finish_reason=cast(Finish, piece.finish), stop_reason=piece.stop_reason,
            logprobs=self._logprobs(index, piece) if piece.logprobs else None,
        )  # fmt: skip

    def _logprobs(self, index: int, piece: Piece) -> Logprobs:
        tokens = [self.text.token(token) for token in piece.tokens]
        *offsets, self._reported_characters[index] = accumulate(
            map(len, tokens), initial=self._reported_characters[index]
        )
        return Logprobs(
            tokens=tokens,
            token_logprobs=[entry.logprob for entry in piece.logprobs],
            top_logprobs=[
                {self.text.token(token): logprob for token, logprob in [(drawn, entry.logprob), *entry.top.items()]}
                for drawn, entry in zip(piece.tokens, piece.logprobs, strict=True)
            ],
            text_offset=offsets,
        )
