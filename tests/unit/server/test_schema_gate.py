"""Schemas that answers are to follow, on their way to the engine, with the compiler that the engine has."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from outrider_runtime.server.gate import GateFacts, RequestGate
from outrider_runtime.server.schema_gate import SchemaGate, schema_compiler
from outrider_runtime.server.vllm_backend import add_innermost

ITSELF = {"type": "object", "properties": {"a": {"$ref": "#"}}}
HUGE = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 1.8e19}}}
FINE = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10}, "b": {"type": "number"}}}


def client(root_path: str = "") -> httpx.AsyncClient:
    """An app with vLLM's own order of middlewares, and the paths that reached its routes."""
    app = FastAPI()
    app.root_path = root_path
    app.add_middleware(CORSMiddleware, allow_origins=["*"])

    @app.post("/v1/chat/completions")
    @app.post("/v1/responses")
    async def answer(request: Request) -> Any:
        return await request.json()

    app.middleware_stack = app.build_middleware_stack()  # as vLLM leaves it
    compiler = schema_compiler("auto")
    assert compiler is not None
    add_innermost(app, lambda inner: RequestGate(inner, lambda: GateFacts(slo_classes=(), draining=False)))
    add_innermost(app, lambda inner: SchemaGate(inner, compiler))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://pod")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "response_format", {"type": "json_schema", "json_schema": {"schema": HUGE}}),
        ("/v1/chat/completions", "structured_outputs", {"json": HUGE}),
        ("/v1/chat/completions", "structured_outputs", {"json": json.dumps(HUGE)}),
        ("/v1/chat/completions", "structured_outputs", {"json": {"type": "string", "pattern": "(?<=a)b"}}),
        ("/v1/chat/completions", "structured_outputs", {"json": {"type": "integer", "maximum": 2**64 - 1}}),
        ("/v1/responses", "text", {"format": {"type": "json_schema", "name": "x", "schema": HUGE}}),
    ],
)
async def test_schema_beyond_compiler_is_refused_by_field(path: str, field: str, value: object) -> None:
    """A bound of 1.8e19 in response_format was a 500."""
    async with client() as pod:
        answer = await pod.post(path, json={field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"the JSON schema in {field} cannot be compiled: ")
    assert ".cc" not in error["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {**ITSELF, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
        {
            "$ref": "#/$defs/0",
            "$defs": {
                str(n): {"type": "array", "items": {"$ref": f"#/$defs/{n + 1}"}, "minItems": 1} for n in range(300)
            }
            | {"300": {}},
        },
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/x"}},
            "required": ["a"],
            "$defs": {"x": {"$ref": "#/$defs/x"}},
        },
    ],
    ids=str,
)
async def test_schema_without_a_finite_instance_is_refused(schema: object) -> None:
    """Bug: the grammar masked every token, and the request ended with a 500."""
    async with client() as pod:
        answer = await pod.post("/v1/chat/completions", json={"structured_outputs": {"json": schema}})
    assert answer.status_code == 400
    assert "no finite value satisfies a part of it" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("choice", "tool", "field"),
    [
        ("required", {"function": {"name": "f", "parameters": HUGE}}, "tools[0].function.parameters"),
        ({"type": "function", "name": "f"}, {"name": "f", "parameters": HUGE}, "tools[0].parameters"),
        ({"type": "any"}, {"name": "f", "input_schema": HUGE}, "tools[0].input_schema"),
    ],
)
async def test_tool_that_must_be_called_has_a_schema_that_compiles(choice: object, tool: object, field: str) -> None:
    """Bug: the schema of a tool was looked at in no case, and a forced call is a grammar of it."""
    async with client() as pod:
        answer = await pod.post("/v1/chat/completions", json={"tool_choice": choice, "tools": [tool]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": FINE}}},
        {"response_format": {"type": "text"}},
        {"response_format": 5, "text": ["a"], "structured_outputs": {"json": "{"}},
        {"structured_outputs": {"json": {"type": "number", "maximum": 1.8e19}}},
        {"structured_outputs": {"json": ITSELF}},
        {"structured_outputs": {"json": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"tools": [{"type": "function", "function": {"parameters": HUGE}}]},
        {"tool_choice": "auto", "tools": [{"function": {"parameters": HUGE}}]},
        {"tool_choice": "required", "tools": [5, {"function": None}, {"function": {"parameters": FINE}}]},
    ],
)
async def test_schema_that_compiles_reaches_the_engine(document: object) -> None:
    """What is no schema at all is the engine's to judge, and a tool's is text of the prompt."""
    async with client() as pod:
        answer = await pod.post("/v1/chat/completions", json=document)
    assert (answer.status_code, answer.json()) == (200, document)


@pytest.mark.parametrize("path", ["/llm/v1/chat/completions", "/v1/chat/completions"])
async def test_root_path_serves_both_spellings(path: str) -> None:
    """`--root-path=/llm` was accepted, and every path under it was a 404 of the gate's."""
    async with client("/llm") as pod:
        answer = await pod.post(path, json={"a": 1})
        refused = await pod.post(path, content=b"{")
    assert (answer.status_code, refused.status_code) == (200, 400)


async def test_root_path_opens_no_closed_path() -> None:
    """The gate judges what the router sees."""
    async with client("/llm") as pod:
        answers = [await pod.post(path, json={}) for path in ("/llm/metrics", "/llm/llm/v1/chat/completions", "/llm")]
    assert [answer.status_code for answer in answers] == [404, 404, 404]


async def test_error_of_the_gate_has_cors_headers() -> None:
    """A browser shows a page no answer without them, not even why a request was refused."""
    async with client() as pod:
        answer = await pod.post("/v1/chat/completions", content=b"{", headers={"Origin": "http://page"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (400, "*")
