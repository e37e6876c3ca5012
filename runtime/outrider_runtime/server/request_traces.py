"""A span for each request, around the engine's own, where OpenTelemetry is configured.

vLLM exports spans to `--otlp-traces-endpoint`. Here the standard variables OTEL_* become that argument, and the gate's
span becomes the parent of vLLM's, with the trace of the client above it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from outrider_runtime.server.request_ids import replace_headers

SPAN_NAME = "outrider.request"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
SERVICE_NAME = "OTEL_SERVICE_NAME"
HTTP_PROTOCOL = "http/protobuf"
HTTP_PORT = 4318
"""OTLP's port for HTTP; the other one is for gRPC."""
_OPTION = "--otlp-traces-endpoint"
_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})


def trace_arguments(environ: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Return the arguments of vLLM's server that have it export traces; none where `arguments` have them already."""
    if any(argument.replace("_", "-").startswith(_OPTION) for argument in arguments):
        return []
    endpoint = _endpoint(environ)
    return [f"{_OPTION}={endpoint}"] if endpoint else []


def trace_environment(environ: Mapping[str, str], service: str) -> dict[str, str]:
    """Return the variables that vLLM's exporter reads, which knows the special ones alone."""
    added = {TRACES_PROTOCOL: _protocol(environ), SERVICE_NAME: service}
    return {name: value for name, value in added.items() if name not in environ} if _endpoint(environ) else {}


def _endpoint(environ: Mapping[str, str]) -> str:
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return ""
    if traces := environ.get(TRACES_ENDPOINT, ""):
        return traces
    base = environ.get(ENDPOINT, "")
    return f"{base.rstrip('/')}/v1/traces" if base and _protocol(environ) == HTTP_PROTOCOL else base


def _protocol(environ: Mapping[str, str]) -> str:
    chosen = environ.get(TRACES_PROTOCOL) or environ.get(PROTOCOL)
    endpoint = environ.get(TRACES_ENDPOINT) or environ.get(ENDPOINT) or ""
    return chosen or (HTTP_PROTOCOL if _port(endpoint) == HTTP_PORT else "grpc")


def _port(endpoint: str) -> int | None:
    try:
        return urlsplit(endpoint).port
    except ValueError:
        return None


class RequestTraces:
    """Begins the spans of requests."""

    def __init__(self, tracer: Any) -> None:
        """tracer: OpenTelemetry's."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: MutableMapping[str, Any], request_id: str) -> Any:
        """Return a span below the client's, which `scope` names as the parent of the engine's from now on."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        carried = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _TRACE_HEADERS
        }
        attributes = {"gen_ai.request.id": request_id, "url.path": str(scope["path"])}
        context = self._propagator.extract(carried)
        span = self._tracer.start_span(SPAN_NAME, context=context, kind=SpanKind.SERVER, attributes=attributes)
        below: dict[str, str] = {}
        self._propagator.inject(below, context=set_span_in_context(span, context))
        if below:
            replace_headers(scope, {name.encode(): value.encode("latin-1") for name, value in below.items()})
        return span


def request_traces(environ: Mapping[str, str]) -> RequestTraces | None:
    """Return the traces of an engine that exports its own. It has set up the exporter and put it in the environment."""
    if not environ.get(TRACES_ENDPOINT):
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return RequestTraces(trace.get_tracer("outrider_runtime"))
