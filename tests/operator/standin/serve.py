"""`outrider-runtime serve`, as a stand-in: two ports, the mounted configuration, a drain that waits for requests."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from outrider_crds import runtime_config
from outrider_crds.runtime_state import RuntimeState

from tests.operator.standin.state import FATAL_S, Behaviour, is_new, runtime_state

ECHO_PATH = "/v1/echo"
"""Answers with the pod's name and the request's headers."""


class Runtime:
    """The process's state; handlers of both ports read it."""

    def __init__(self, boot: runtime_config.BootConfig, behaviour: Behaviour) -> None:
        self.boot = boot
        self._behaviour = behaviour
        self._started_at = time.time()
        self._hot = _read_hot()
        self._canary = ("", self._started_at)
        """The canary's attempt, and when it began."""
        self._running = 0
        self._tokens = 0
        self.draining = False
        self.answers = behaviour.answer

    @property
    def ready(self) -> bool:
        warm = 0 <= self._behaviour.start_s <= time.time() - self._started_at
        return warm and not self.draining

    def state(self) -> RuntimeState:
        self._hot = _read_hot()
        attempt = self._hot.canary.id if self._hot.canary is not None else ""
        if attempt != self._canary[0]:
            self._canary = attempt, time.time()
        self._end_where_fatal()
        return runtime_state(
            self.boot,
            self._hot,
            self._behaviour,
            started_at=self._started_at,
            ready=self.ready,
            product=_product(),
            profiled=any(Path(runtime_config.PROFILES_DIR).glob("*/target.json")),
            streamed_tokens=self._tokens,
            canary_since=self._canary[1],
        )

    def _end_where_fatal(self) -> None:
        """End as a process does that the kernel kills for its memory."""
        canary, since = self._hot.canary, self._canary[1]
        if canary is not None and is_new(canary, self._behaviour.fatal) and time.time() - since > FATAL_S:
            os._exit(128 + signal.SIGKILL)

    def stream(self, send: Any, tokens: int) -> None:
        """A made-up answer, 20 tokens a second; a drain waits for its end."""
        self._running += 1
        try:
            for index in range(tokens):
                send(f"data: {json.dumps({'choices': [{'delta': {'content': f'{index} '}}]})}\n\n")
                self._tokens += 1
                time.sleep(0.05)
            send("data: [DONE]\n\n")
        finally:
            self._running -= 1

    def drain(self) -> None:
        self.draining = True
        while self._running:
            time.sleep(0.02)


def _read_hot() -> runtime_config.HotConfig:
    return runtime_config.HotConfig.model_validate_json(Path(runtime_config.HOT_FILE).read_bytes())


def _product() -> str:
    annotations = Path(runtime_config.PODINFO_DIR, "annotations").read_text()
    match = re.search(rf'^{re.escape(runtime_config.PRODUCT_ANNOTATION)}="(.*)"$', annotations, re.MULTILINE)
    return match[1] if match else ""


class _Handler(BaseHTTPRequestHandler):
    runtime: Runtime
    protocol_version = "HTTP/1.0"

    def log_message(self, format: str, *_: Any) -> None:  # noqa: A002
        """Silence."""

    def answer(self, status: int, body: str, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.end_headers()
        self.wfile.write(body.encode())


class Serving(_Handler):
    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": self.runtime.boot.target.name}]}))
        elif self.path == ECHO_PATH:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.answer(200, json.dumps({"pod": socket.gethostname(), "headers": headers}))
        else:
            self.answer(200 if self.path == "/health" else 404, "{}")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.runtime.stream(self._send, request.get("max_tokens", 10))

    def _send(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()


class Admin(_Handler):
    def do_GET(self) -> None:
        if self.path == runtime_config.STATE_PATH:
            self._state(self.runtime.state().model_dump_json(by_alias=True))
        elif self.path == runtime_config.METRICS_PATH:
            self.answer(200, _metrics(self.runtime), "text/plain; version=0.0.4")
        elif self.path == runtime_config.WHY_PATH:
            self.answer(200, "1 request: k = 0\n", "text/plain")
        elif self.path == runtime_config.READY_PATH:
            self.answer(200 if self.runtime.ready else 503, "{}")
        else:
            self.answer(200 if self.path == runtime_config.LIVE_PATH else 404, "{}")

    def _state(self, body: str) -> None:
        """Answer with the state, in the way that the stand-in's settings say."""
        numbers = {"digits": "9" * 400, "huge": "1" + "0" * 30}
        how = self.runtime.answers
        if how in numbers:
            body = re.sub(r'"outputTokens":\d+', f'"outputTokens":{numbers[how]}', body)
        self.answer(200, body[:100] if how == "halves" else body)
        if how == "halves":
            self.wfile.flush()
            time.sleep(0.3)
            self.wfile.write(body[100:].encode())
        while how == "endless":
            self.wfile.write(b" " * 65536)


def _metrics(runtime: Runtime) -> str:
    """Generated by the real runtime's code, so that the operator's queries meet the real names."""
    from outrider_runtime.server.runtime_metrics import RuntimeStateCollector
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(RuntimeStateCollector(runtime.state))
    return generate_latest(registry).decode()


def _serve_admin(runtime: Runtime) -> None:
    """The admin port as the real runtime serves it."""
    from outrider_runtime.server.admin import AdminPages, serve_admin
    from outrider_runtime.server.health import Phase, Vitals
    from outrider_runtime.server.listeners import listen
    from prometheus_client import CollectorRegistry

    def vitals() -> Vitals:
        phase = Phase.DRAINING if runtime.draining else Phase.SERVING if runtime.ready else Phase.STARTING
        return Vitals(phase, plugin_active=True, report_age_s=0.0)

    serve_admin(
        listen("", runtime_config.ADMIN_PORT, "--admin-port"), AdminPages(vitals, runtime.state, CollectorRegistry())
    )


def _listen(runtime: Runtime, handler: type[_Handler], port: int) -> ThreadingHTTPServer:
    bound = type(handler.__name__, (handler,), {"runtime": runtime})
    server = ThreadingHTTPServer(("", port), bound)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--config", default=runtime_config.BOOT_FILE, type=Path)
    parser.add_argument("--drain-grace")
    parser.add_argument("--drain-timeout")
    arguments = parser.parse_args()
    behaviour = Behaviour.read(os.environ)
    if behaviour.crash:
        sys.exit("the stand-in was told to crash: no such weights")
    if behaviour.fill_bytes:
        Path(runtime_config.MODEL_CACHE_DIR, "weights").write_bytes(bytes(behaviour.fill_bytes))
    runtime = Runtime(runtime_config.BootConfig.model_validate_json(arguments.config.read_bytes()), behaviour)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    _listen(runtime, Serving, runtime_config.SERVING_PORT)
    if behaviour.answer == "real":
        _serve_admin(runtime)
    else:
        _listen(runtime, Admin, runtime_config.ADMIN_PORT)
    stopped.wait()
    runtime.drain()
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
