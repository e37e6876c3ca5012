"""Finds the SLO of a request: a class from the header `X-SLO-Class` or the body, or its own times from llm-d's headers.

The body names a class in `vllm_xargs.slo_class`. Headers override the body: a gateway in front of the service sets
them per tenant, and the tenant's client must not be able to change them. The engine puts a request without a class
into the class that keeps its own times, else into the service's default class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider_crds.runtime_config import SLO_CLASS_HEADER, SLO_LIMIT_HEADERS

from outrider_runtime.loop.slo_accounting import LONGEST_LIMIT_MS, SLO_CLASS_ARGUMENT
from outrider_runtime.server.server_errors import RequestError

XARGS = "vllm_xargs"
XARGS_KEY = SLO_CLASS_ARGUMENT
BODY_PARAM = f"{XARGS}.{XARGS_KEY}"


def with_slo_class(
    body: dict[str, Any], headers: Sequence[str], known: Sequence[str], *, allow_other_names: bool = False
) -> dict[str, Any]:
    """Return the body with the request's class in `vllm_xargs.slo_class`; the same object when nothing changes.

    headers: values of all X-SLO-Class headers of the request. known: classes of the current hot config.
    Raises RequestError (400) for a class that is not known, and for any other name in `vllm_xargs` unless allowed.
    """
    xargs = body.get(XARGS)
    if isinstance(xargs, Mapping) and not allow_other_names:
        _check_names(xargs)
    if not headers:
        if isinstance(xargs, Mapping) and XARGS_KEY in xargs:
            _check_class(xargs[XARGS_KEY], known, BODY_PARAM)
        return body
    if len(set(headers)) > 1:
        raise RequestError(f"the request has {len(headers)} {SLO_CLASS_HEADER} headers that differ; send one")
    _check_class(headers[0], known, SLO_CLASS_HEADER)
    if xargs is not None and not isinstance(xargs, Mapping):
        return body  # wrong type: the engine's own validation names the field and the type
    return {**body, XARGS: {**(xargs or {}), XARGS_KEY: headers[0]}}


def with_slo_limits(
    body: dict[str, Any], headers: Mapping[str, Sequence[str]], *, is_class_in_header: bool
) -> dict[str, Any]:
    """Return the body with the request's own TPOT and TTFT in `vllm_xargs`; the same object without such headers.

    The times replace a class that the body names, but not a class from the header. headers: values by header, for the
    headers of `SLO_LIMIT_HEADERS`. Raises RequestError (400) for a value that is not a time.
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
    if not 0 < value <= LONGEST_LIMIT_MS:
        raise RequestError(f"{header} must be one number of milliseconds above 0, not {', '.join(values)[:80]}", header)
    return value


def _check_names(xargs: Mapping[str, Any]) -> None:
    """Refuse all names but `slo_class`: vLLM reads some names itself, and unexpected values end its engine."""
    unknown = sorted(str(name) for name in xargs if name != XARGS_KEY)
    if unknown:
        raise RequestError(f"unknown {XARGS}: {', '.join(unknown)}; this server knows only {XARGS_KEY}", XARGS)


def _check_class(name: object, known: Sequence[str], param: str) -> None:
    if isinstance(name, str) and name in known:
        return
    classes = ", ".join(known) if known else "none: the service defines no SLO classes, so send no class"
    raise RequestError(f"unknown SLO class {name!r} in {param}; known classes: {classes}", param)
