"""The tenant of a request: headers alone name it, as a hash."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_runtime.drafters.suffix import TENANT_ARGUMENT
from outrider_runtime.server.gate import GateFacts, RequestGate
from outrider_runtime.server.tenant_header import with_tenant

from tests.unit.server.test_gate import Service

KEY, OTHER_KEY = (b"authorization", b"Bearer one"), (b"authorization", b"Bearer two")
NAME, OTHER_NAME = (b"x-tenant", b"a"), (b"x-tenant", b"b")


def tenant(*headers: tuple[bytes, bytes], body: dict[str, Any] | None = None) -> object:
    return with_tenant(body or {}, [(b"accept", b"text"), *headers]).get("vllm_xargs", {}).get(TENANT_ARGUMENT)


def test_tenants_differ_if_any_of_their_headers_does() -> None:
    """Promise: another tenant's name alone gives nothing to a client with a key of its own."""
    several = [(KEY,), (OTHER_KEY,), (NAME,), (OTHER_NAME,), (NAME, KEY), (NAME, OTHER_KEY), ((b"x-api-key", b"one"),)]
    assert len({tenant(*headers) for headers in several}) == len(several)
    assert tenant(NAME, KEY) == tenant(KEY, NAME)


def test_engine_gets_a_hash_in_place_of_the_key() -> None:
    assert "one" not in str(with_tenant({"prompt": "x"}, [KEY]))


@pytest.mark.parametrize("headers", [(), (KEY,)])
def test_body_cannot_name_a_tenant(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    body = {"vllm_xargs": {TENANT_ARGUMENT: "mine", "other": 1}}
    made = with_tenant(body, headers)["vllm_xargs"]
    assert made.pop(TENANT_ARGUMENT, None) == tenant(*headers)
    assert made == {"other": 1}


def test_request_without_tenant_passes_as_it_is() -> None:
    body = {"prompt": "x", "vllm_xargs": {"slo_class": "batch"}}
    assert with_tenant(body, []) is body


async def test_gate_names_the_tenant_and_the_slo_class() -> None:
    service = Service()
    await service.post({"prompt": "x"}, X_Tenant="a")
    assert service.reached() == {"prompt": "x"}, "no drafter shares by tenant"
    facts = GateFacts(slo_classes=("batch",), draining=False)
    service.gate = RequestGate(service.engine, lambda: facts, names_tenants=True)
    service.client._transport.app = service.gate  # type: ignore[attr-defined]
    await service.post({"prompt": "x"}, X_Tenant="a", X_SLO_Class="batch")
    assert service.reached()["vllm_xargs"] == {"slo_class": "batch", TENANT_ARGUMENT: tenant(NAME)}
    await service.client.aclose()
