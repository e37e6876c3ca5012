"""Admission webhooks, as a platform may have them: one without a server, one that takes its time and then denies."""

from __future__ import annotations

import base64
import http.server
import json
import select
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster

KIND = "validatingwebhookconfiguration"


def configure(
    cluster: Cluster, name: str, namespace: str, client: dict[str, Any], *, group: str, resource: str, **more: Any
) -> None:
    """Call `client` (a WebhookClientConfig) for each create and update of a resource in the namespace."""
    rule = {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": [resource]}
    webhook = {
        "name": f"{name}.outrider.dev",
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "clientConfig": client,
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        **more,
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    cluster.apply({**kind, "metadata": {"name": name}, "webhooks": [webhook]})


class HoldingWebhook:
    """Answers no call before `release`; then it denies, with the HTTP status of a server that is busy."""

    def __init__(self, address: str, folder: Path) -> None:
        self.waiting = 0
        """Calls that are held."""
        self.given_up = 0
        """Calls whose caller went before they were answered."""
        self._released = threading.Event()
        self._lock = threading.Lock()
        certificate = certificate_for(address, folder)
        self._server = http.server.ThreadingHTTPServer((address, 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_name("key"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.client = {
            "url": f"https://{address}:{self._server.server_address[1]}/",
            "caBundle": base64.b64encode(certificate.read_bytes()).decode(),
        }

    def release(self) -> None:
        self._released.set()

    def __enter__(self) -> HoldingWebhook:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        webhook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if webhook._hold(self.connection):
                    body = json.dumps(_denial(review)).encode()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *_: object) -> None:  # noqa: A002
                """Silence."""

        return Handler

    def _hold(self, connection: Any) -> bool:
        """False where the caller went first."""
        self._count(waiting=1)
        gone = False
        while not gone and not self._released.wait(0.1):
            gone = bool(select.select([connection], [], [], 0)[0])
        self._count(waiting=-1, given_up=int(gone))
        return not gone

    def _count(self, *, waiting: int, given_up: int = 0) -> None:
        with self._lock:
            self.waiting += waiting
            self.given_up += given_up


def _denial(review: dict[str, Any]) -> dict[str, Any]:
    status = {"code": 503, "reason": "ServiceUnavailable", "message": "the policy says no"}
    return {**review, "response": {"uid": review["request"]["uid"], "allowed": False, "status": status}}


def certificate_for(address: str, folder: Path) -> Path:
    """Write a self-signed certificate for the address and its key."""
    certificate = folder / "webhook.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=webhook",
         "-addext", f"subjectAltName=IP:{address}", "-keyout", folder / "key", "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate
