"""What many services cost the operator: delay of a burst and of a change, memory, writes, CPU.

    BENCH_SERVICES=200 python -m bench.operator_services

The cluster and the operator's process are real. Only the first PODS services have a pod, which runs the runtime's
stand-in; the others have `replicas: 0`, so that the cores are left to the operator and the API server. Writes
results/operator_services_<N>.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_crds.generate import CRD_FILE
from outrider_operator.kinds import LEASE, SERVICE

from bench.scale import audit
from tests.cluster.cluster import Cluster
from tests.cluster.spec import ClusterSpec
from tests.operator import manifests
from tests.operator.client import Client, condition, wait_for
from tests.operator.process import NAMESPACE, OperatorProcess

RESULTS = Path(__file__).parent / "results"
SERVICES = "many"
PODS = 4
CHANGES = 100
"""Services that are changed one after the other; the delay until each change is applied is measured."""
CREATORS = 4
IDLE_S = 130.0
"""Time of two periodic reconciles of all services."""


@dataclass(frozen=True)
class Bound:
    name: str
    measured: float
    at_most: float
    unit: str

    def row(self) -> dict[str, Any]:
        return {**self.__dict__, "met": self.measured <= self.at_most}


class Bench:
    def __init__(self, cluster: Cluster, operator: OperatorProcess, callbacks: Path, count: int) -> None:
        self._cluster = cluster
        self._operator = operator
        self._callbacks = callbacks
        self._client = Client(str(cluster.kubeconfig))
        self._names = [f"service-{number:04d}" for number in range(count)]

    def run(self) -> dict[str, Any]:
        burst = self._measure_burst()
        changes = self._measure_changes()
        idle = self._measure_idle()
        callbacks = json.loads(self._callbacks.read_text())
        return {"burst": burst, "changes": changes, "idle": idle, "callbacks": callbacks, "lease": self._read_lease()}

    def _measure_burst(self) -> dict[str, Any]:
        """Create all services at once; measure the time to the first condition of each, and the writes."""
        began = time.monotonic()
        with ThreadPoolExecutor(CREATORS) as creators:
            list(creators.map(self._create, self._names))
        created_s = time.monotonic() - began
        wait_for("every service to be up to date", self._all_updated, 1800, every_s=5)
        updated_s = time.monotonic() - began
        self._settle()
        writes = self._writes()
        first = sorted(audit.first_status_s(writes, SERVICES).values())
        ours = [write for write in writes if write.by_operator and write.namespace == SERVICES]
        return {
            "created_s": created_s,
            "updated_s": updated_s,
            "first_condition_s": {"median": statistics.median(first), "p99": _share(first, 0.99), "max": first[-1]},
            "writes_per_service": len(ours) / len(self._names),
            "of_which": {
                what: count / len(self._names)
                for what, count in Counter(f"{w.verb} {w.resource}" for w in ours).items()
            },
            "api_server_s_per_write": statistics.mean(write.took_s for write in ours),
        }

    def _measure_changes(self) -> dict[str, Any]:
        """Change a hot field of one service after the other, periodic reconciles in between."""
        changed: dict[str, float] = {}
        for name in self._names[:: max(1, len(self._names) // CHANGES)]:
            changed[name] = time.time() - 0.001
            self._client.patch(SERVICE, SERVICES, name, {"spec": {"speculation": {"maxDraftTokens": 3}}})
            time.sleep(0.3)
        self._settle()
        wake_ups_s = sorted(audit.wake_up_s(self._writes(), SERVICES, changed))
        missing = len(changed) - len(wake_ups_s)
        return {"changed": len(changed), "not_applied": missing, "median_s": statistics.median(wake_ups_s),
                "p99_s": _share(wake_ups_s, 0.99), "max_s": wake_ups_s[-1]}  # fmt: skip

    def _measure_idle(self) -> dict[str, float]:
        before, looks = len(self._operator_writes()), self._operator.metric("outrider_operator_reconciles_total")
        cpu_s = self._operator.cpu_s()
        time.sleep(IDLE_S)
        return {
            "seconds": IDLE_S,
            "writes": len(self._operator_writes()) - before,
            "reconciles": self._operator.metric("outrider_operator_reconciles_total") - looks,
            "cpu_percent": 100 * (self._operator.cpu_s() - cpu_s) / IDLE_S,
            "memory_mb": self._operator.memory_mb(),
        }

    def _read_lease(self) -> dict[str, Any]:
        lease = self._client.get(LEASE, NAMESPACE, "outrider-operator") or {}
        return {"transitions": lease["spec"]["leaseTransitions"], "held": bool(lease["spec"]["holderIdentity"])}

    def _create(self, name: str) -> None:
        spec: dict[str, Any] = {"profiling": {"mode": "Skip"}, "replicas": int(name in self._names[:PODS])}
        self._client.create(SERVICE, manifests.service(name, SERVICES, **spec))

    def _all_updated(self) -> bool:
        services = self._client.list(SERVICE, SERVICES)
        return all(condition(service, "Updated").get("status") == "True" for service in services)

    def _settle(self) -> None:
        """Wait until there is no write for ten seconds."""
        seen = -1
        while (services := len(self._operator_writes())) != seen:
            seen = services
            time.sleep(10)

    def _operator_writes(self) -> list[audit.Write]:
        return [write for write in self._writes() if write.by_operator]

    def _writes(self) -> list[audit.Write]:
        return audit.read_writes(self._cluster.layout.audit)


def bounds(measured: dict[str, Any]) -> list[Bound]:
    return [
        Bound("change to applied, p99, API server aside", measured["changes"]["p99_s"], 1, "s"),
        Bound("changes that were not applied", measured["changes"]["not_applied"], 0, ""),
        Bound("memory", measured["idle"]["memory_mb"], 300, "MB"),
        Bound("writes while nothing changes", measured["idle"]["writes"], 0, ""),
        Bound("longest callback, CPU time", measured["callbacks"]["longest_s"], 0.1, "s"),
        Bound("changes of the Lease's holder", measured["lease"]["transitions"], 0, ""),
    ]


def run(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterSpec(nodes=1), Path(folder) / "cluster") as cluster:
        cluster.kubectl("apply", "--server-side", "-f", str(CRD_FILE))
        for namespace in (NAMESPACE, SERVICES):
            cluster.kubectl("create", "namespace", namespace)
        callbacks = Path(folder) / "callbacks.json"
        operator = OperatorProcess(cluster.kubeconfig, Path(folder) / "operator.log", **_variables())
        operator.start(command=[sys.executable, "-m", "bench.scale.callbacks", str(callbacks)])
        try:
            measured = Bench(cluster, operator, callbacks, count).run()
        finally:
            operator.stop()
    return {"services": count, "pods": PODS, **measured, "bounds": [bound.row() for bound in bounds(measured)]}


def _variables() -> dict[str, str]:
    """`BENCH_PYTHONPATH` measures the operator of another checkout."""
    path = os.environ.get("BENCH_PYTHONPATH", "")
    return {"PYTHONPATH": path} if path else {}


def _share(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    count = int(os.environ.get("BENCH_SERVICES", "200"))
    results = run(count)
    RESULTS.mkdir(exist_ok=True)
    target = Path(os.environ.get("BENCH_RESULT", str(RESULTS / f"operator_services_{count}.json")))
    target.write_text(json.dumps(results, indent=1) + "\n")
    for bound in results["bounds"]:
        verdict = "met" if bound["met"] else "MISSED"
        print(f"{bound['name']:42} {bound['measured']:8.3f} of {bound['at_most']} {bound['unit']}: {verdict}")


if __name__ == "__main__":
    main()
