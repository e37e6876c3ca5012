"""What the operator costs with 50 services: memory, API writes, and how soon a change is applied.

    python -m tests.benchmarks.operator_50_services [--services 50] [--pods 50] [--minutes 2]

Real cluster, real operator process, stand-in pods: one for each of the first PODS services, the others are scaled to
zero (50 pods take two free cores some minutes to start). Writes results/operator_50_services.json and .png.
Bounds (issue 3): idle under 150 MB and under one API write a minute (Lease renewals aside); loaded at most 4 status
writes a minute for each service; from wake-up to applied under 1 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_crds.generate import CRD_FILE
from outrider_crds.runtime_config import SERVING_PORT
from outrider_operator.kinds import CONFIG_MAP, POD, SERVICE

from tests.cluster.cluster import Cluster
from tests.cluster.spec import ClusterSpec
from tests.operator import manifests
from tests.operator.client import Client, condition, is_ready, wait_for
from tests.operator.process import NAMESPACE, OperatorProcess

RESULTS = Path(__file__).parent / "results"
SERVICES = "fifty"


@dataclass(frozen=True)
class Bound:
    name: str
    measured: float
    at_most: float
    unit: str

    def row(self) -> dict[str, Any]:
        return {**self.__dict__, "met": self.measured <= self.at_most}


class Bench:
    def __init__(self, cluster: Cluster, operator: OperatorProcess, count: int, pods: int) -> None:
        self._cluster = cluster
        self._operator = operator
        self._client = Client(str(cluster.kubeconfig))
        self._pods = pods
        self._names = [f"service-{number:02d}" for number in range(count)]

    def bring_up(self) -> float:
        """Seconds until all services are up to date."""
        began = time.monotonic()
        for index, name in enumerate(self._names):
            spec: dict[str, Any] = {"profiling": {"mode": "Skip"}, "replicas": int(index < self._pods)}
            self._client.create(SERVICE, manifests.service(name, SERVICES, **spec))
        wait_for("every service to be up to date", self._all_updated, 900, every_s=2)
        return time.monotonic() - began

    def idle(self, minutes: float) -> dict[str, float]:
        """Memory, and writes a minute, once the first windows have passed."""
        time.sleep(150)
        before = self._writes()
        time.sleep(60 * minutes)
        return {
            "memory_mb": self._operator.memory_mb(),
            "writes_per_minute": (self._writes() - before) / minutes,
        }

    def wake_up_s(self) -> list[float]:
        """From the patch of a hot field to the ConfigMap that carries it, for each service in turn."""
        return [self._applied_after_s(name) for name in self._names]

    def loaded(self, minutes: float) -> dict[str, float]:
        """Every pod answers a stream; status writes a minute for each service."""
        pods = [pod for pod in self._client.list(POD, SERVICES) if is_ready(pod)]
        for pod in pods:
            threading.Thread(target=_stream, args=(pod["status"]["podIP"], minutes * 60 + 60), daemon=True).start()
        time.sleep(30)
        before = self._writes()
        time.sleep(60 * minutes)
        return {
            "memory_mb": self._operator.memory_mb(),
            "streams": float(len(pods)),
            "status_writes_per_minute_and_service": (self._writes() - before) / minutes / len(pods),
        }

    def _applied_after_s(self, name: str) -> float:
        began = time.monotonic()
        self._client.patch(SERVICE, SERVICES, name, {"spec": {"speculation": {"maxDraftTokens": 3}}})
        wait_for(name, lambda: '"maxDraftTokens": 3' in self._hot(name), 30, every_s=0.01)
        return time.monotonic() - began

    def _hot(self, name: str) -> str:
        document = self._client.get(CONFIG_MAP, SERVICES, f"{name}-hot")
        assert document is not None
        return str(document["data"]["config.json"])

    def _all_updated(self) -> bool:
        services = self._client.list(SERVICE, SERVICES)
        return all(condition(service, "Updated").get("status") == "True" for service in services)

    def _writes(self) -> int:
        """Writes so far by the operator's own connections (its client, and kopf's for Events), Leases aside."""
        count = 0
        for line in self._cluster.layout.audit.read_text().splitlines(keepends=True):
            entry = json.loads(line) if line.endswith("\n") else {}
            agent = entry.get("userAgent", "")
            ours = agent == "outrider-operator" or agent.startswith("kopf")
            count += ours and entry["objectRef"]["resource"] != "leases"
        return count


def _stream(address: str, seconds: float) -> None:
    """20 tokens a second."""
    body = json.dumps({"max_tokens": int(20 * seconds)}).encode()
    with urllib.request.urlopen(f"http://{address}:{SERVING_PORT}/v1/chat/completions", data=body) as answer:
        while answer.read(4096):
            pass


def run(count: int, pods: int, minutes: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterSpec(nodes=2), Path(folder) / "cluster") as cluster:
        cluster.kubectl("apply", "--server-side", "-f", str(CRD_FILE))
        for namespace in (NAMESPACE, SERVICES):
            cluster.kubectl("create", "namespace", namespace)
        operator = OperatorProcess(cluster.kubeconfig, Path(folder) / "operator.log")
        operator.start()
        try:
            bench = Bench(cluster, operator, count, pods)
            up_s = bench.bring_up()
            idle = bench.idle(minutes)
            wake_up_s = bench.wake_up_s()
            loaded = bench.loaded(minutes)
        finally:
            operator.stop()
    return report(count, pods, up_s, idle, wake_up_s, loaded)


def report(
    count: int, pods: int, up_s: float, idle: dict[str, float], wake_up_s: Sequence[float], loaded: dict[str, float]
) -> dict[str, Any]:
    bounds = [
        Bound("idle memory", idle["memory_mb"], 150, "MB"),
        Bound("idle API writes", idle["writes_per_minute"], 1, "per minute"),
        Bound("status writes, loaded", loaded["status_writes_per_minute_and_service"], 4, "per minute and service"),
        Bound("wake-up to applied, slowest", max(wake_up_s), 1, "s"),
    ]
    return {
        "services": count,
        "pods": pods,
        "bring_up_s": up_s,
        "idle": idle,
        "loaded": loaded,
        "wake_up_s": {"median": statistics.median(wake_up_s), "max": max(wake_up_s), "all": list(wake_up_s)},
        "bounds": [bound.row() for bound in bounds],
    }


def plot(results: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (shares, times) = pyplot.subplots(1, 2, figsize=(10, 3.2))
    bounds = results["bounds"]
    shares.barh([bound["name"] for bound in bounds], [bound["measured"] / bound["at_most"] for bound in bounds])
    shares.axvline(1.0, color="black", linestyle="--")
    shares.set_xlabel("share of the bound")
    times.plot(sorted(results["wake_up_s"]["all"]), marker=".")
    times.set_xlabel("service, sorted")
    times.set_ylabel("wake-up to applied (s)")
    figure.suptitle(f"The operator with {results['services']} services, {results['pods']} pods")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=50)
    parser.add_argument("--pods", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=2.0)
    arguments = parser.parse_args()
    results = run(arguments.services, arguments.pods, arguments.minutes)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "operator_50_services.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, RESULTS / "operator_50_services.png")
    for bound in results["bounds"]:
        verdict = "met" if bound["met"] else "MISSED"
        print(f"{bound['name']:32} {bound['measured']:8.3f} of {bound['at_most']} {bound['unit']}: {verdict}")


if __name__ == "__main__":
    main()
