"""The SLO class that a request gets, and the error for an unknown one."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_runtime.server.server_errors import RequestError
from outrider_runtime.server.slo_header import with_slo_class

KNOWN = ("interactive", "batch")


def _class(body: dict[str, Any], *headers: str) -> object:
    return with_slo_class(body, headers, KNOWN).get("vllm_xargs", {}).get("slo_class")


def test_header_names_the_class() -> None:
    """The header X-SLO-Class names it."""
    assert _class({"prompt": "x"}, "batch") == "batch"


def test_body_names_the_class() -> None:
    """So does vllm_xargs.slo_class in the body; the body is then passed on as it is."""
    body = {"prompt": "x", "vllm_xargs": {"slo_class": "batch"}}
    assert with_slo_class(body, (), KNOWN) is body


def test_header_wins_over_the_body() -> None:
    """A gateway's class holds, whatever the client behind it wrote."""
    assert _class({"vllm_xargs": {"slo_class": "interactive"}}, "batch") == "batch"


def test_header_keeps_other_fields_of_the_body() -> None:
    """The engine's plugins read their own keys there."""
    body = with_slo_class({"n": 1, "vllm_xargs": {}}, ("batch",), KNOWN)
    assert body == {"n": 1, "vllm_xargs": {"slo_class": "batch"}}


def test_request_without_class_is_left_to_the_default() -> None:
    """The default class is hot; the engine that counts applies it."""
    body = {"prompt": "x", "vllm_xargs": {}}
    assert with_slo_class(body, (), KNOWN) is body


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({}, ("gold",)),
        ({}, ("",)),
        ({"vllm_xargs": {"slo_class": "gold"}}, ()),
        ({"vllm_xargs": {"slo_class": 5}}, ()),
        ({"vllm_xargs": {"slo_class": None}}, ()),
        ({"vllm_xargs": {"slo_class": ["batch"]}}, ()),
        ({"vllm_xargs": {"slo_class": {"batch": 1}}}, ()),
    ],
)
def test_unknown_class_is_refused_with_the_known_ones(body: dict[str, Any], headers: tuple[str, ...]) -> None:
    """Issue 3: unknown SLO class is a 400; the client learns what it could have sent."""
    with pytest.raises(RequestError, match=r"unknown SLO class .*known classes: interactive, batch") as refused:
        with_slo_class(body, headers, KNOWN)
    assert refused.value.status == 400


def test_class_is_refused_if_the_service_has_none() -> None:
    """A class sent to a service that has none is a mistake, too."""
    with pytest.raises(RequestError, match="the service defines no SLO classes"):
        with_slo_class({}, ("batch",), ())


def test_two_headers_that_differ_are_refused() -> None:
    """Proxies differ in which of two headers they keep."""
    with pytest.raises(RequestError, match="2 X-SLO-Class headers that differ"):
        with_slo_class({}, ("batch", "interactive"), KNOWN)
    assert _class({}, "batch", "batch") == "batch"


def test_xargs_of_wrong_type_are_left_to_the_engine() -> None:
    """vLLM names the field and its type; the gate does not repeat that."""
    body = {"vllm_xargs": [1]}
    assert with_slo_class(body, ("batch",), KNOWN) is body


@pytest.mark.parametrize("headers", [(), ("batch",)])
def test_unknown_xargs_are_refused_by_name(headers):
    """Bug: `kv_transfer_params: "x"` reached the engine's scheduler, which answered with a 500."""
    with pytest.raises(RequestError, match="kv_transfer_params"):
        with_slo_class({"vllm_xargs": {"kv_transfer_params": "x"}}, headers, KNOWN)
