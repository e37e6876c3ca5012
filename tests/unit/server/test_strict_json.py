"""Bodies that Python's JSON parser takes, and the sampler must never see."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_runtime.server.server_errors import RequestError
from outrider_runtime.server.strict_json import MAX_NESTING, parse_object


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{nope", "not JSON: .* at line 1 column 2"),
        (b"", "not JSON"),
        (b"\xff\xfe{", "not JSON: expected value at line 1 column 1"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "must be a JSON object, not a list"),
        (b"null", "not null"),
        (b'{"temperature": NaN}', "temperature contains NaN"),
        (b'{"temperature": [{"a": -Infinity}]}', "temperature contains -Infinity.*; send a finite one"),
        (b'{"temperature": 1e999}', "temperature contains Infinity.*a number that is too large"),
        (b'{"top_k": 9223372036854775808}', "top_k contains 9223372036854775808, a number that is too large"),
        (b"NaN", "must be a JSON object, not a number"),
        (b'{"a": 1, "stop": ' + b"[" * 101 + b"]" * 101 + b"}", "stop is nested too deeply"),
        (b'{"stop": ' + b'{"a": ' * 900 + b"1" + b"}" * 900 + b"}", "the body is nested too deeply"),
        (b'{"stop": ["\\ud800"]}', "not JSON: unexpected end of hex escape at line 1 column 18"),
        (b'{"a": 1, "\\udfff": 2}', "not JSON: lone leading surrogate in hex escape"),
        (b'{"prompt": "\xed\xa0\x80"}', "not JSON: invalid unicode code point"),
        ('{"prompt": "a"}'.encode("utf-16"), "not JSON"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "not JSON: number out of range"),
    ],
)
def test_body_that_is_no_json_object_is_refused_with_reason(body: bytes, sentence: str) -> None:
    """Issue 3: malformed JSON is a 4xx with an OpenAI-style error, and the pod lives on."""
    with pytest.raises(RequestError, match=sentence) as refused:
        parse_object(body)
    assert refused.value.status == 400


@given(st.binary(max_size=64))
def test_any_bytes_raise_only_request_errors(body: bytes) -> None:
    """An exception that is not a RequestError would be a 500."""
    with suppress(RequestError):
        assert isinstance(parse_object(body), dict)


def test_nesting_up_to_the_limit_passes() -> None:
    """Python's parser and writer can handle the deepest nesting that is accepted."""
    body = b'{"stop": ' + b"[" * MAX_NESTING + b"]" * MAX_NESTING + b"}"
    assert json.loads(json.dumps(parse_object(body))) == json.loads(body)


def test_invalid_number_is_refused_by_field() -> None:
    """Clients show the error next to the field."""
    with pytest.raises(RequestError) as refused:
        parse_object(b'{"n": 1, "seed": 9223372036854775808}')
    assert refused.value.param == "seed"


@pytest.mark.parametrize("field", ["tools", "functions", "messages", "input", "documents"])
@pytest.mark.parametrize("number", [9223372036854776000, 2**64 - 1, -(2**70), 10**307])
def test_large_integer_in_prompt_text_passes_unchanged(field: str, number: int) -> None:
    """A tool whose schema has "maximum": 9223372036854776000 made each request of its agent a 400."""
    document = {field: [{"function": {"parameters": {"properties": {"a": {"maximum": number}}}}}]}
    parsed = parse_object(json.dumps(document).encode())
    assert json.dumps(parsed) == json.dumps(document)


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "text"])
def test_large_integer_in_compiled_schema_has_64_bits(field: str) -> None:
    """What does not fit there cannot cross to the engine's process; the schema's compiler judges the rest."""
    assert parse_object(json.dumps({field: {"maximum": 2**64 - 1}}).encode()) == {field: {"maximum": 2**64 - 1}}
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(RequestError, match=f"{field} contains {number}, a number that is too large"):
            parse_object(json.dumps({field: {"maximum": number}}).encode())


def test_integer_of_many_digits_in_tools_is_refused() -> None:
    """No double holds it, as the template of a chat may need."""
    with pytest.raises(RequestError, match=r"tools contains 9+, a number that is too large"):
        parse_object(b'{"tools": [' + b"9" * 309 + b"]}")


def test_ordinary_numbers_pass_unchanged() -> None:
    """Strictness costs nothing that JSON allows."""
    assert parse_object(b'{"a": 1, "b": -0.5, "c": 1e300, "d": 1e-320}') == {"a": 1, "b": -0.5, "c": 1e300, "d": 1e-320}
    assert parse_object(b'{"seed": -9223372036854775808}') == {"seed": -(2**63)}


def test_characters_beyond_the_first_plane_pass_unchanged() -> None:
    """Clients that write ASCII send them as two escapes."""
    expected = {"prompt": "\U0001f600", "\U0001f600": 1}
    for body in (b'{"prompt": "\\ud83d\\ude00", "\\ud83d\\ude00": 1}', '{"prompt": "😀", "😀": 1}'.encode()):
        assert parse_object(body) == expected
