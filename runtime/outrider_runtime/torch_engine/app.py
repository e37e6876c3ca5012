"""The OpenAI API over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from outrider_runtime.server.gate import DOCUMENT
from outrider_runtime.server.server_errors import RequestError
from outrider_runtime.torch_engine import engine_request
from outrider_runtime.torch_engine.answers import Chats, Completions, Piece, piece_of, usage
from outrider_runtime.torch_engine.inference_engine import Output
from outrider_runtime.torch_engine.length import Longest
from outrider_runtime.torch_engine.openai_requests import ChatRequest, CompletionRequest, GenerationRequest, parse
from outrider_runtime.torch_engine.parameters import check_tokens, drawn_apart, sampling, stops
from outrider_runtime.torch_engine.text import NOT_FOR_TEMPLATES, Text
from outrider_runtime.torch_engine.thread import Client, EngineDeadError

Outputs = AsyncGenerator[tuple[int, Output], None]
CLIENT_LEFT = 499
"""Nobody reads it."""
DEAD = RequestError("the engine has died; the pod starts again", status=HTTPStatus.INTERNAL_SERVER_ERROR)


class ApiService:
    """What the routes stand on."""

    def __init__(self, model: str, text: Text, vocabulary: int, longest: int, client: Client) -> None:
        """model: the name that it is served under. longest: tokens of a request."""
        self.model, self.text, self.client = model, text, client
        self._vocabulary, self.longest = vocabulary, Longest(longest, longest * text.longest_token)
        self.started_at = int(time.time())

    def completion(self, document: Mapping[str, Any]) -> tuple[CompletionRequest, list[list[int]]]:
        """What is asked, and its prompts' tokens. Long texts take seconds: not for the event loop."""
        self.longest.check(document)
        ask = parse(CompletionRequest, document)
        prompts = [self._tokens(one, ask.add_special_tokens) for one in ask.prompts]
        if not prompts:
            raise RequestError("the prompt is empty", "prompt")
        return ask, prompts

    def chat(self, document: Mapping[str, Any]) -> tuple[ChatRequest, list[list[int]]]:
        """As `completion`."""
        self.longest.check(document)
        ask = parse(ChatRequest, document)
        text = self._rendered(ask)
        self.longest.check_text(text, "messages")
        return ask, [self.text.encode(text, special=ask.add_special_tokens)]

    def _rendered(self, ask: ChatRequest) -> str:
        variables = ask.chat_template_kwargs or {}
        if refused := NOT_FOR_TEMPLATES & variables.keys():
            sentence = f"chat_template_kwargs: {min(refused)} is no variable of a template; remove it"
            raise RequestError(sentence, "chat_template_kwargs")
        variables = {"add_generation_prompt": ask.add_generation_prompt, **variables}
        try:
            return self.text.render_chat([one.plain() for one in ask.messages], variables)
        except ValueError as error:
            raise RequestError(str(error), "messages") from None

    def requests(self, ask: GenerationRequest, name: str, prompts: Sequence[list[int]]) -> list[engine_request.Request]:
        if ask.model is not None and ask.model != self.model:
            raise RequestError(f"the model {ask.model!r} does not exist here", "model", HTTPStatus.NOT_FOUND)
        check_tokens(ask.stop_token_ids or (), "stop_token_ids", self._vocabulary)
        drawn = sampling(ask, self.text.defaults, self._vocabulary)
        return [
            engine_request.Request(
                f"{name}-{index}", list(prompt), len(prompt),
                stops(ask, self.text.end_tokens, len(prompt), self.longest.tokens),
                drawn_apart(drawn),
                self.text.detokenizer(prompt),
            )
            for index, prompt in enumerate(prompts)
        ]  # fmt: skip

    def _tokens(self, prompt: str | list[int], special: bool) -> list[int]:
        if isinstance(prompt, str):
            return self.text.encode(prompt, special=special)
        check_tokens(prompt, "prompt", self._vocabulary)
        return prompt


def make_app(service: ApiService) -> FastAPI:
    """It stands behind a RequestGate, which reads the bodies."""
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestError)
    async def refused(_request: Request, error: RequestError) -> Response:
        return _refusal(error)

    @app.exception_handler(HTTPException)
    async def unknown(_request: Request, error: HTTPException) -> Response:
        refusal = _refusal(RequestError(error.detail, status=HTTPStatus(error.status_code)))
        refusal.headers.update(error.headers or {})
        return refusal

    @app.exception_handler(EngineDeadError)
    async def dead(_request: Request, _error: EngineDeadError) -> Response:
        return _refusal(DEAD)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        ask, prompts = await asyncio.to_thread(service.completion, request.scope.pop(DOCUMENT))
        documents = Completions(f"cmpl-{uuid.uuid4().hex}", service.model, service.text)
        return await _answer(service, ask, prompts, documents, request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        ask, prompts = await asyncio.to_thread(service.chat, request.scope.pop(DOCUMENT))
        documents = Chats(f"chatcmpl-{uuid.uuid4().hex}", service.model, service.text)
        return await _answer(service, ask, prompts, documents, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {
            "id": service.model, "object": "model", "created": service.started_at, "owned_by": "outrider",
            "max_model_len": service.longest.tokens,
        }  # fmt: skip
        return {"object": "list", "data": [card]}

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        return Response(status_code=503 if service.client.errored else 200)

    return app


async def _answer(
    service: ApiService, ask: GenerationRequest, prompts: list[list[int]], documents: Chats | Completions, http: Request
) -> Response:
    asked = service.requests(ask, documents.name, prompts)
    tokens = sum(map(len, prompts))
    outputs = service.client.answers(asked, ask.extra_args)
    if ask.stream:
        return StreamingResponse(_stream(outputs, ask, documents, tokens), media_type="text/event-stream")
    pieces = [Piece() for _ in asked]
    if not await _unless_gone(http, _collect(outputs, pieces)):
        return Response(status_code=CLIENT_LEFT)
    used = usage(tokens, sum(len(one.tokens) for one in pieces))
    return JSONResponse(documents.whole(pieces, used).model_dump(mode="json", exclude_unset=True))


async def _collect(outputs: Outputs, pieces: Sequence[Piece]) -> None:
    async with contextlib.aclosing(outputs):
        async for index, output in outputs:
            pieces[index].add(output)


async def _unless_gone(http: Request, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` came to its end before the client left; what it raises passes through."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(http))
    try:
        done, _ = await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            working.result()
        return working in done
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _stream(
    outputs: Outputs, ask: GenerationRequest, documents: Chats | Completions, prompt: int
) -> AsyncIterator[str]:
    """Server-sent events."""
    answer, first = 0, documents.first()
    if first is not None:
        yield _event(first)
    try:
        async with contextlib.aclosing(outputs):
            async for index, output in outputs:
                answer += len(output.tokens)
                piece = piece_of(output)
                if piece.text or piece.finish or piece.logprobs:
                    yield _event(documents.part(index, piece))
    except EngineDeadError:
        yield f"data: {DEAD.body().decode()}\n\n"
        return
    if ask.usage_in_stream:
        yield _event(documents.last(usage(prompt, answer)))
    yield "data: [DONE]\n\n"


def _event(document: BaseModel) -> str:
    return f"data: {document.model_dump_json(exclude_unset=True)}\n\n"


def _refusal(error: RequestError) -> Response:
    return Response(error.body(), error.status, media_type="application/json")
