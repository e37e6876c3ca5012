"""`metrics.source: Prometheus`: the same figures as from the pods, from a real Prometheus that scrapes them."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from outrider_crds.runtime_config import ADMIN_PORT

from setup import system
from tests.cluster.cluster import Cluster
from tests.operator.chart.release import rendered
from tests.operator.client import PATIENCE_S, Service, wait_for
from tests.operator.conftest import Make
from tests.operator.process import OperatorProcess
from tests.ports import free_port

pytestmark = pytest.mark.cluster

TRAFFIC = {"tokens_per_s": 200, "speedup": 1.25, "attained_percent": 95}


class Prometheus:
    """The server, which scrapes given pods as the chart's PodMonitor says."""

    def __init__(self, folder: Path, pod_monitor: dict[str, Any]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._targets = folder / "targets.json"
        self._targets.write_text("[]")
        config = folder / "prometheus.yml"
        discovery = [{"files": [str(self._targets)], "refresh_interval": "1s"}]
        (endpoint,) = pod_monitor["spec"]["podMetricsEndpoints"]
        scrape = {"honor_labels": endpoint["honorLabels"], "relabel_configs": _relabelings(endpoint)}
        scrapes = [{"job_name": "pods", "file_sd_configs": discovery, **scrape}]
        config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": scrapes}))
        command = [
            str(system.prometheus()), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def scrape(self, targets: list[dict[str, Any]]) -> None:
        partial = self._targets.with_suffix(".partial")
        partial.write_text(json.dumps(targets))
        partial.rename(self._targets)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def prometheus(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, operator_process: OperatorProcess
) -> Generator[Prometheus, None, None]:
    """Running, and named in the operator's configuration."""
    folder = tmp_path_factory.mktemp("prometheus")
    chart = rendered(cluster, folder, {"podMonitor": {"enabled": True}})
    (monitor,) = (entry for entry in chart if entry["metadata"]["name"].endswith("-serving"))
    server = Prometheus(folder, monitor)
    wait_for("Prometheus", server.ready)
    operator_process.stop()
    operator_process.start(OUTRIDER_PROMETHEUS_URL=server.url)
    yield server
    server.stop()
    operator_process.stop()
    operator_process.start(OUTRIDER_PROMETHEUS_URL="")


@pytest.fixture(scope="module")
def services(make: Make, prometheus: Prometheus) -> Generator[dict[str, Service], None, None]:
    """Two with the same traffic, and a pod of another namespace that says it belonged to one of them."""
    common = {"standin": TRAFFIC, "replicas": 2, "profiling": {"mode": "Skip"}}
    services = {
        source: make(f"from-{source.lower()}", metrics={"source": source}, **common)
        for source in ("Prometheus", "Pods")
    }
    for service in services.values():
        service.wait_updated()
    victim = services["Prometheus"]
    with _impostor(victim) as address:
        mallory = _target(address, "mallory", victim.name)
        pods = [
            _target(f"{pod['status']['podIP']}:{ADMIN_PORT}", service.namespace, service.name)
            for service in services.values()
            for pod in service.pods()
        ]
        prometheus.scrape([mallory, *pods])
        yield services


def test_the_figures_are_those_of_the_pods(services: dict[str, Service]) -> None:
    """Goodput is a sum over pods, the speed-up is measured, attainment is of the class: within what clocks allow.

    A pod of another namespace that exports the service's labels adds nothing.
    """
    for service in services.values():
        service.wait("GoodputHealthy", "True", "AsPredicted")
        service.wait("SLOAttained", "True", "Attained")
    wait_for("full windows of both", lambda: all(map(_is_full, services.values())))
    figures = services["Prometheus"].read()["status"]
    assert float(figures["goodput"]["speedup"]) == pytest.approx(1.25, rel=0.03)
    assert figures["goodput"]["pods"] == "2/2"
    assert float(figures["drafts"][0]["acceptanceRate"]) == pytest.approx(0.7, rel=0.05)
    assert float(figures["sloClasses"][0]["attainmentPercent"]) == pytest.approx(95, rel=0.02)
    assert figures["sloClasses"][0]["tpotP50"] == services["Pods"].read()["status"]["sloClasses"][0]["tpotP50"]


def test_a_prometheus_that_is_away_is_said(services: dict[str, Service], prometheus: Prometheus) -> None:
    """Missing data is never a failure: Unknown/MetricsUnavailable, and the service stays Ready."""
    prometheus.stop()
    healthy = services["Prometheus"].wait("GoodputHealthy", "Unknown", "MetricsUnavailable")
    assert prometheus.url in healthy["message"]
    assert services["Prometheus"].condition("Ready")["status"] == "True"
    assert services["Pods"].condition("GoodputHealthy")["status"] == "True"


def _is_full(service: Service) -> bool:
    """Both pods' tokens of a whole window, and probes enough for a speed-up."""
    goodput = service.read()["status"].get("goodput") or {}
    return 350 < float(goodput.get("tokensPerSecond") or 0) < 450 and bool(goodput.get("speedup"))


def _relabelings(endpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """The endpoint's, as the Prometheus operator writes them: after its own of the namespace."""
    own = {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"}
    theirs = ({_snake(name): value for name, value in entry.items()} for entry in endpoint["relabelings"])
    return [own, *theirs]


def _snake(name: str) -> str:
    return re.sub("([A-Z])", lambda match: f"_{match[1].lower()}", name)


def _target(address: str, namespace: str, service: str) -> dict[str, Any]:
    """Labels of a pod in Kubernetes' service discovery."""
    about = {"namespace": namespace, "pod_label_outrider_dev_service": service}
    return {"targets": [address], "labels": {f"__meta_kubernetes_{name}": value for name, value in about.items()}}


@contextmanager
def _impostor(victim: Service) -> Iterator[str]:
    """A pod that exports a million tokens a second under the victim's labels; its address."""
    labels = f'outrider_namespace="{victim.namespace}",outrider_service="{victim.name}",namespace="{victim.namespace}"'

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            tokens = int(time.time() * 1e6)
            page = f"outrider_ready{{{labels}}} 1\noutrider_output_tokens_total{{{labels}}} {tokens}\n"
            self.wfile.write(page.encode())

        def log_message(self, format: str, *_: object) -> None:  # noqa: A002
            """Silence."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
