"""Finds the tenant of a request, for drafters that share answers between the requests of a tenant.

A tenant is a hash of the headers in `TENANT_HEADERS`: the name that a gateway in front of the service sets, and the API
key. Requests share only if all of them agree, so that a client gains nothing from another tenant's name. The hash goes
into `vllm_xargs`, where the body's own value never counts. A request without these headers has no tenant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from outrider_runtime.drafters.suffix import TENANT_ARGUMENT
from outrider_runtime.server.slo_header import XARGS

TENANT_HEADERS = (b"x-tenant", b"authorization", b"x-api-key")


def with_tenant(body: dict[str, Any], headers: Iterable[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Return the body with the request's tenant in `vllm_xargs`; the same object if there is none to set or remove.

    headers: of the ASGI scope, with names in lower case.
    """
    named = sorted((name, value) for name, value in headers if name in TENANT_HEADERS)
    xargs = body.get(XARGS)
    if xargs is not None and not isinstance(xargs, Mapping):
        return body  # wrong type: the engine's own validation names the field and the type
    others = {name: value for name, value in (xargs or {}).items() if name != TENANT_ARGUMENT}
    if named:
        return {**body, XARGS: {**others, TENANT_ARGUMENT: hashlib.sha256(repr(named).encode()).hexdigest()}}
    return body if len(others) == len(xargs or {}) else {**body, XARGS: others}
