"""Which SLO class a request belongs to: the header `X-SLO-Class`, else `vllm_xargs.slo_class` in the body.

Where both are given the header wins: a gateway in front of the service sets it for a tenant, whatever the tenant's
client writes into the body; so do the times in llm-d's headers. A request without a class gets, in the engine, the
class that keeps those times, else the service's default class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider_crds.runtime_config import SLO_CLASS_HEADER, SLO_LIMIT_HEADERS

from outrider_runtime.server.errors import RequestError

XARGS = "vllm_xargs"
XARGS_KEY = "slo_class"
_LONGEST_MS = 86_400_000.0
"""A day."""
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


def with_slo_limits(
    body: dict[str, Any], headers: Mapping[str, Sequence[str]], *, is_class_in_header: bool
) -> dict[str, Any]:
    """The body with the request's own TPOT and TTFT in `vllm_xargs`, in the place of a class that the body names; the
    same object without such headers.

    `headers` maps each header of SLO_LIMIT_HEADERS to its values. Raises RequestError (400) for what is no time.
    """
    xargs = body.get(XARGS)
    limits = {SLO_LIMIT_HEADERS[name]: _milliseconds(name, values) for name, values in headers.items() if values}
    if not limits or (xargs is not None and not isinstance(xargs, Mapping)):
        return body
    return {**body, XARGS: {**limits, **(xargs or {})} if is_class_in_header else limits}


def _milliseconds(header: str, values: Sequence[str]) -> float:
    try:
        (value,) = {float(text) for text in values}
    except ValueError:
        value = math.nan
    if not 0 < value <= _LONGEST_MS:
        raise RequestError(f"{header} must be one number of milliseconds above 0, not {', '.join(values)[:80]}", header)
    return value


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
