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
from outrider_runtime.server.request_ids import REQUEST_ID_HEADER
from outrider_runtime.server.server_errors import RequestError
from outrider_runtime.torch_engine import engine_request
from outrider_runtime.torch_engine.answers import ChatAnswers, CompletionAnswers, Piece, make_piece, usage
from outrider_runtime.torch_engine.inference_engine import Output
from outrider_runtime.torch_engine.length import Longest
from outrider_runtime.torch_engine.openai_requests import ChatRequest, CompletionRequest, GenerationRequest, parse
from outrider_runtime.torch_engine.parameters import check_tokens, sampling, stops, with_own_seed
from outrider_runtime.torch_engine.text import NOT_FOR_TEMPLATES, Text
from outrider_runtime.torch_engine.thread import Client, EngineDeadError

Outputs = AsyncGenerator[tuple[int, Output], None]
CLIENT_LEFT = 499
"""HTTP status of a request whose client has left, as nginx logs it; the client never sees it."""
DEAD = RequestError("the engine has stopped after an error; the pod restarts", status=HTTPStatus.INTERNAL_SERVER_ERROR)


class ApiService:
    """The served model, as the routes need it: its text, its limits and the engine's client."""

    def __init__(
        self, model: str, text: Text, vocabulary: int, longest: int, client: Client, aliases: Sequence[str] = ()
    ) -> None:
        """model: the name in answers. longest: tokens that prompt and answer may have together. aliases: other names
        that requests may use."""
        self.names = tuple(dict.fromkeys((model, *aliases)))
        self.model = model
        self.text = text
        self.client = client
        self._vocabulary = vocabulary
        self.longest = Longest(longest, longest * text.longest_token)
        self.started_at = int(time.time())

    def completion(self, document: Mapping[str, Any]) -> tuple[CompletionRequest, list[list[int]]]:
        """Parse a completion request; return its fields and the tokens of its prompts.

        A long text takes seconds to tokenize, so this must not run on the event loop.
        """
        self.longest.check(document)
        body = parse(CompletionRequest, document)
        prompts = [self._tokens(prompt, body.add_special_tokens) for prompt in body.prompts]
        if not prompts:
            raise RequestError("the prompt is empty", "prompt")
        return body, prompts

    def chat(self, document: Mapping[str, Any]) -> tuple[ChatRequest, list[list[int]]]:
        """Parse a chat request; return its fields and the tokens of its prompt. Like `completion`, it may be slow."""
        self.longest.check(document)
        body = parse(ChatRequest, document)
        text = self._render(body)
        self.longest.check_text(text, "messages")
        return body, [self.text.encode(text, special=body.add_special_tokens)]

    def _render(self, body: ChatRequest) -> str:
        variables = body.chat_template_kwargs or {}
        if refused := NOT_FOR_TEMPLATES & variables.keys():
            sentence = f"chat_template_kwargs: {min(refused)} is not a template variable; remove it"
            raise RequestError(sentence, "chat_template_kwargs")
        variables = {"add_generation_prompt": body.add_generation_prompt, **variables}
        try:
            return self.text.render_chat([message.plain() for message in body.messages], variables)
        except ValueError as error:
            raise RequestError(str(error), "messages") from None

    def requests(
        self, body: GenerationRequest, name: str, prompts: Sequence[list[int]]
    ) -> list[engine_request.Request]:
        if body.model is not None and body.model not in self.names:
            raise RequestError(f"this service does not serve the model {body.model!r}", "model", HTTPStatus.NOT_FOUND)
        check_tokens(body.stop_token_ids or (), "stop_token_ids", self._vocabulary)
        own_sampling = sampling(body, self.text.defaults, self._vocabulary)
        return [
            engine_request.Request(
                f"{name}-{index}", list(prompt), len(prompt),
                stops(body, self.text.end_tokens, len(prompt), self.longest.tokens),
                with_own_seed(own_sampling),
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
    """Build the API's routes. A RequestGate in front of them reads and parses the bodies."""
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestError)
    async def answer_refusal(_request: Request, error: RequestError) -> Response:
        return _refusal(error)

    @app.exception_handler(HTTPException)
    async def answer_http_error(_request: Request, error: HTTPException) -> Response:
        refusal = _refusal(RequestError(error.detail, status=HTTPStatus(error.status_code)))
        refusal.headers.update(error.headers or {})
        return refusal

    @app.exception_handler(EngineDeadError)
    async def answer_dead_engine(_request: Request, _error: EngineDeadError) -> Response:
        return _refusal(DEAD)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body, prompts = await asyncio.to_thread(service.completion, request.scope.pop(DOCUMENT))
        documents = CompletionAnswers(f"cmpl-{_request_id(request)}", service.model, service.text)
        return await _answer(service, body, prompts, documents, request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body, prompts = await asyncio.to_thread(service.chat, request.scope.pop(DOCUMENT))
        documents = ChatAnswers(f"chatcmpl-{_request_id(request)}", service.model, service.text)
        return await _answer(service, body, prompts, documents, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {
            "object": "model", "created": service.started_at, "owned_by": "outrider",
            "max_model_len": service.longest.tokens,
        }  # fmt: skip
        return {"object": "list", "data": [{"id": name, **card} for name in service.names]}

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        return Response(status_code=503 if service.client.errored else 200)

    return app


def _request_id(request: Request) -> str:
    """Return the id that the gate has checked, or made."""
    return request.headers[REQUEST_ID_HEADER.decode()]


async def _answer(
    service: ApiService, body: GenerationRequest, prompts: list[list[int]],
    documents: ChatAnswers | CompletionAnswers, http: Request,
) -> Response:  # fmt: skip
    # The engine needs names of its own: clients may use an id twice.
    requests = service.requests(body, f"{documents.name}-{uuid.uuid4().hex[:8]}", prompts)
    tokens = sum(map(len, prompts))
    outputs = service.client.answers(requests, body.extra_args)
    if body.stream:
        return StreamingResponse(_stream(outputs, body, documents, tokens), media_type="text/event-stream")
    pieces = [Piece() for _ in requests]
    if not await _unless_gone(http, _collect(outputs, pieces)):
        return Response(status_code=CLIENT_LEFT)
    used = usage(tokens, sum(len(piece.tokens) for piece in pieces))
    return JSONResponse(documents.whole(pieces, used).model_dump(mode="json", exclude_unset=True))


async def _collect(outputs: Outputs, pieces: Sequence[Piece]) -> None:
    async with contextlib.aclosing(outputs):
        async for index, output in outputs:
            pieces[index].add(output)


async def _unless_gone(http: Request, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`; return whether it ended before the client left. An exception of `work` is raised here."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(http))
    try:
        done, _ = await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            working.result()
        return working in done
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _stream(
    outputs: Outputs, body: GenerationRequest, documents: ChatAnswers | CompletionAnswers, prompt: int
) -> AsyncIterator[str]:
    """Yield the answer as server-sent events. prompt: tokens of all prompts, for the usage."""
    answer = 0  # tokens of all choices so far
    first = documents.first()
    if first is not None:
        yield _event(first)
    try:
        async with contextlib.aclosing(outputs):
            async for index, output in outputs:
                answer += len(output.tokens)
                piece = make_piece(output)
                if piece.text or piece.finish or piece.logprobs:
                    yield _event(documents.part(index, piece))
    except EngineDeadError:
        yield f"data: {DEAD.body().decode()}\n\n"
        return
    if body.usage_in_stream:
        yield _event(documents.last(usage(prompt, answer)))
    yield "data: [DONE]\n\n"


def _event(document: BaseModel) -> str:
    return f"data: {document.model_dump_json(exclude_unset=True)}\n\n"


def _refusal(error: RequestError) -> Response:
    return Response(error.body(), error.status, media_type="application/json")
