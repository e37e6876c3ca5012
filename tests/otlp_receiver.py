"""A small OTLP receiver over HTTP: it keeps the spans that it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, str]


@dataclass
class Receiver:
    endpoint: str
    """Base address, as OTEL_EXPORTER_OTLP_ENDPOINT has it."""
    spans: list[Span] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        """Environment of a process that is to send its spans here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }

    def named(self, name: str, trace: str = "") -> list[Span]:
        """Spans of this name, of one trace if that is named."""
        return [span for span in self.spans if span.name == name and trace in ("", span.trace_id)]


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                receiver.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep the tests' output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        services = [entry.value.string_value for entry in resource.resource.attributes if entry.key == "service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                attributes = {
                    entry.key: entry.value.string_value or str(entry.value.int_value) for entry in span.attributes
                }
                yield Span(
                    span.name, "".join(services), span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                    attributes,
                )  # fmt: skip
