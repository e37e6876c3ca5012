"""An adapter for external metrics, as prometheus-adapter and KEDA have one: the API server asks it for the HPA."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.cluster import Cluster
from tests.operator.webhook import certificate_for

GROUP, VERSION, METRIC = "external.metrics.k8s.io", "v1beta1", "outrider_demand_replicas"
_ROOT = f"/apis/{GROUP}/{VERSION}"


class ExternalMetrics:
    """Serves the demand that the page at `url` holds, by namespace and labels."""

    def __init__(self, cluster: Cluster, url: str, folder: Path) -> None:
        self._cluster, self._url = cluster, url
        address = cluster.machine_address
        self._certificate = certificate_for(address, folder)
        self._server = http.server.ThreadingHTTPServer((address, 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate, self._certificate.with_name("key"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)

    def _register(self) -> None:
        port = self._server.server_address[1]
        name = {"name": "outrider-external-metrics", "namespace": "default"}
        spec = {"type": "ExternalName", "externalName": self._cluster.machine_address, "ports": [{"port": port}]}
        self._cluster.apply({"apiVersion": "v1", "kind": "Service", "metadata": name, "spec": spec})
        self._cluster.apply(
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": f"{VERSION}.{GROUP}"},
                "spec": {
                    "group": GROUP, "version": VERSION, "groupPriorityMinimum": 100, "versionPriority": 100,
                    "service": {**name, "port": port}, "insecureSkipTLSVerify": True,
                },
            }
        )  # fmt: skip

    def __enter__(self) -> ExternalMetrics:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._register()
        return self

    def __exit__(self, *_: object) -> None:
        # An API that does not answer keeps every namespace from going: its content cannot be listed.
        self._cluster.kubectl("delete", "apiservice", f"{VERSION}.{GROUP}")
        self._cluster.kubectl("delete", "service", "outrider-external-metrics", "-n", "default")
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        adapter = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(adapter._answer(self.path)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *_: object) -> None:  # noqa: A002
                """Silence."""

        return Handler

    def _answer(self, path: str) -> dict[str, Any]:
        url = urlsplit(path)
        parts = url.path.removeprefix(_ROOT).strip("/").split("/")
        if parts[0] != "namespaces":
            resource = {"name": METRIC, "singularName": "", "namespaced": True, "verbs": ["get"]}
            resources = [{**resource, "kind": "ExternalMetricValueList"}]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}",
                    "resources": resources}  # fmt: skip
        selector = parse_qs(url.query).get("labelSelector", [""])[0]
        labels_sought = {
            "outrider_namespace": parts[1],
            **dict(pair.split("=") for pair in selector.split(",") if pair),
        }
        items = [{"metricName": METRIC, "metricLabels": labels, "timestamp": "2026-01-01T00:00:00Z",
                  "value": f"{1000 * value:.0f}m"}
                 for labels, value in self._series() if labels_sought.items() <= labels.items()]  # fmt: skip
        return {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": items}

    def _series(self) -> Iterator[tuple[dict[str, str], float]]:
        with urllib.request.urlopen(self._url, timeout=10) as page:
            families = text_string_to_metric_families(page.read().decode())
        for family in families:
            for sample in family.samples if family.name == METRIC else ():
                yield sample.labels, sample.value
