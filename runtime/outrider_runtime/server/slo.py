"""Which SLO class a request belongs to: the header `X-SLO-Class`, else `vllm_xargs.slo_class` in the body.

Where both are given the header wins: a gateway in front of the service sets it for a tenant, whatever the tenant's
client writes into the body. A request that names no class gets the service's default class, in the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider_crds.runtime_config import SLO_CLASS_HEADER

from outrider_runtime.server.errors import RequestError

XARGS = "vllm_xargs"
XARGS_KEY = "slo_class"
BODY_PARAM = f"{XARGS}.{XARGS_KEY}"


def with_slo_class(body: dict[str, Any], headers: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
    """The body with the request's class in `vllm_xargs.slo_class`; the same object when nothing changes.

    `headers` holds the values of every X-SLO-Class header of the request, `known` the classes of the hot config in
    force. Raises RequestError (400) for a class that is not known, naming those that are, and for
    any other `vllm_xargs`.
    """
    xargs = body.get(XARGS)
    if isinstance(xargs, Mapping):
        _check_names(xargs)
    if not headers:
        if isinstance(xargs, Mapping) and XARGS_KEY in xargs:
            _check(xargs[XARGS_KEY], known, BODY_PARAM)
        return body
    if len(set(headers)) > 1:
        raise RequestError(f"the request carries {len(headers)} {SLO_CLASS_HEADER} headers that differ; send one")
    _check(headers[0], known, SLO_CLASS_HEADER)
    if xargs is not None and not isinstance(xargs, Mapping):
        return body  # malformed: the engine's own validation names the field and its type
    return {**body, XARGS: {**(xargs or {}), XARGS_KEY: headers[0]}}


def _check_names(xargs: Mapping[str, Any]) -> None:
    """The engine takes some of these for its own, and dies of values that it does not expect."""
    unknown = sorted(str(name) for name in xargs if name != XARGS_KEY)
    if unknown:
        raise RequestError(f"unknown {XARGS}: {', '.join(unknown)}; this server knows {XARGS_KEY}", XARGS)


def _check(name: object, known: Sequence[str], param: str) -> None:
    if isinstance(name, str) and name in known:
        return
    classes = ", ".join(known) if known else "none: the service defines no SLO classes, so send no class"
    raise RequestError(f"unknown SLO class {name!r} in {param}; known classes: {classes}", param)
