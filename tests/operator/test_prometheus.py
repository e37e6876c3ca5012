"""`metrics.source: Prometheus`: the same figures as from the pods, from a real Prometheus that scrapes them."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from collections.abc import Generator
from pathlib import Path

import pytest
from outrider_crds.runtime_config import ADMIN_PORT

from setup import system
from tests.operator.client import Service, wait_for
from tests.operator.conftest import Make
from tests.operator.process import OperatorProcess

pytestmark = pytest.mark.cluster

TRAFFIC = {"tokens_per_s": 200, "speedup": 1.25, "attained_percent": 95}


class Prometheus:
    """The server, scraping the pods that it is told of."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._targets = folder / "targets.json"
        self._targets.write_text("[]")
        config = folder / "prometheus.yml"
        discovery = [{"files": [str(self._targets)], "refresh_interval": "1s"}]
        scrapes = [{"job_name": "pods", "file_sd_configs": discovery}]
        config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": scrapes}))
        command = [
            str(system.prometheus()), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def scrape(self, addresses: list[str]) -> None:
        partial = self._targets.with_suffix(".partial")
        partial.write_text(json.dumps([{"targets": [f"{address}:{ADMIN_PORT}" for address in addresses]}]))
        partial.rename(self._targets)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture(scope="module")
def prometheus(
    tmp_path_factory: pytest.TempPathFactory, operator_process: OperatorProcess
) -> Generator[Prometheus, None, None]:
    """Running, and named in the operator's configuration."""
    server = Prometheus(tmp_path_factory.mktemp("prometheus"))
    wait_for("Prometheus", server.ready, 60)
    operator_process.stop()
    operator_process.start(OUTRIDER_PROMETHEUS_URL=server.url)
    yield server
    server.stop()
    operator_process.stop()
    operator_process.start(OUTRIDER_PROMETHEUS_URL="")


@pytest.fixture(scope="module")
def services(make: Make, prometheus: Prometheus) -> dict[str, Service]:
    common = {"standin": TRAFFIC, "replicas": 2, "profiling": {"mode": "Skip"}}
    services = {
        source: make(f"from-{source.lower()}", metrics={"source": source}, **common)
        for source in ("Prometheus", "Pods")
    }
    for service in services.values():
        service.wait_updated(240)
    prometheus.scrape([pod["status"]["podIP"] for service in services.values() for pod in service.ready_pods()])
    return services


def test_the_figures_are_those_of_the_pods(services: dict[str, Service]) -> None:
    """Goodput is a sum over pods, the speed-up is measured, attainment is of the class: within what clocks allow."""
    for service in services.values():
        service.wait("GoodputHealthy", "True", "AsPredicted", timeout_s=240)
        service.wait("SLOAttained", "True", "Attained", timeout_s=60)
    wait_for("full windows of both", lambda: all(350 < _goodput(each) < 450 for each in services.values()), 60)
    figures = services["Prometheus"].read()["status"]
    assert float(figures["goodput"]["speedup"]) == pytest.approx(1.25, rel=0.03)
    assert figures["goodput"]["pods"] == "2/2"
    assert float(figures["drafts"][0]["acceptanceRate"]) == pytest.approx(0.7, rel=0.05)
    assert float(figures["sloClasses"][0]["attainmentPercent"]) == pytest.approx(95, rel=0.02)
    assert figures["sloClasses"][0]["tpotP50"] == services["Pods"].read()["status"]["sloClasses"][0]["tpotP50"]


def test_a_prometheus_that_is_away_is_said(services: dict[str, Service], prometheus: Prometheus) -> None:
    """Missing data is never a failure: Unknown/MetricsUnavailable, and the service stays Ready."""
    prometheus.stop()
    found = services["Prometheus"].wait("GoodputHealthy", "Unknown", "MetricsUnavailable", timeout_s=240)
    assert prometheus.url in found["message"]
    assert services["Prometheus"].condition("Ready")["status"] == "True"
    assert services["Pods"].condition("GoodputHealthy")["status"] == "True"


def _goodput(service: Service) -> float:
    return float((service.read()["status"].get("goodput") or {"tokensPerSecond": "0"})["tokensPerSecond"])
