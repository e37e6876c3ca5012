"""Does an operator that loses its Lease again and again still reconcile every service?

    BENCH_LOSSES=200 python -m bench.lost_leases

The cluster and the operator's process are real; the operator gets a fifth of a core. Another holder takes the Lease at
random moments of the first three seconds of a lead, in which the operator lists, observes and reconciles. Then each
service is changed: the bar is that all changes are applied within a minute. Writes results/lost_leases.json.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider_crds.generate import CRD_FILE
from outrider_operator.kinds import LEASE, SERVICE

from tests.cluster.cluster import Cluster
from tests.cluster.spec import ClusterSpec
from tests.operator import manifests
from tests.operator.client import Client, RefusedError, wait_for
from tests.operator.process import NAMESPACE, OperatorProcess

RESULT = Path(__file__).parent / "results" / "lost_leases.json"
SERVICES = "many"
COUNT = 20
LONGEST_LEADERSHIP_S = 3.0
"""Bound of the random time for which the operator leads: losses fall into its start. What a loss does after a longer
lead is not measured."""
SLICE_S, SHARE = 0.1, 0.2
"""Slices of time, and the share of each in which the operator runs: a fifth of a core."""
LONGEST_APPLY_S = 60.0


def main() -> None:
    losses = int(os.environ.get("BENCH_LOSSES", "200"))
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterSpec(nodes=1), Path(folder) / "cluster") as cluster:
        cluster.kubectl("apply", "--server-side", "-f", str(CRD_FILE))
        for namespace in (NAMESPACE, SERVICES):
            cluster.kubectl("create", "namespace", namespace)
        operator = OperatorProcess(cluster.kubeconfig, Path(folder) / "operator.log")
        operator.start(command=[sys.executable, "-m", "bench.lost_leases", "operator"])
        try:
            results = measure(Client(str(cluster.kubeconfig)), operator, losses)
        finally:
            operator.stop()
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


def measure(client: Client, operator: OperatorProcess, losses: int) -> dict[str, Any]:
    names = [f"service-{number:02d}" for number in range(COUNT)]
    for name in names:
        client.create(SERVICE, manifests.service(name, SERVICES, profiling={"mode": "Skip"}, replicas=0))
    wait_for("each service to be reconciled", lambda: not _list_outdated(client))
    chance, began = random.Random(1), time.monotonic()
    with throttle_operator(operator):
        for number in range(1, losses + 1):
            lose(client, operator, number)
            time.sleep(chance.uniform(0.0, LONGEST_LEADERSHIP_S))
        lost_s, changed = time.monotonic() - began, time.monotonic()
        for name in names:
            client.patch(SERVICE, SERVICES, name, {"spec": {"speculation": {"maxDraftTokens": 3}}})
        wait_for("each change to be applied", lambda: not _list_outdated(client))
        applied_s = time.monotonic() - changed
    return {
        "services": COUNT,
        "losses": losses,
        "seconds_of_losses": round(lost_s),
        "all_applied_s": round(applied_s, 1),
        "at_most_s": LONGEST_APPLY_S,
        "met": applied_s <= LONGEST_APPLY_S,
        "task_restarts": operator.metric("outrider_operator_task_restarts_total"),
    }


def lose(client: Client, operator: OperatorProcess, number: int) -> None:
    """Take the Lease, give it back once the operator has noticed, and wait until that leads again."""
    _write_holder(client, "another")
    wait_for(f"loss {number}", lambda: operator.log_text().count("Lost the Lease") >= number, every_s=0.05)
    _write_holder(client, "")
    wait_for("the operator to lead", lambda: operator.log_text().count("Holding the Lease") > number, every_s=0.05)


def _write_holder(client: Client, identity: str) -> None:
    """Write the holder of the Lease, whatever the operator writes at the same time."""
    while True:
        try:
            client.patch(LEASE, NAMESPACE, "outrider-operator", {"spec": {"holderIdentity": identity}})
        except RefusedError as error:
            if error.status != 409:
                raise
        else:
            return


@contextmanager
def throttle_operator(operator: OperatorProcess) -> Iterator[None]:
    """Let the operator run for a share of the time."""
    over = threading.Event()

    def throttle() -> None:
        while not over.is_set():
            operator.send(signal.SIGSTOP)
            time.sleep((1.0 - SHARE) * SLICE_S)
            operator.send(signal.SIGCONT)
            time.sleep(SHARE * SLICE_S)

    thread = threading.Thread(target=throttle, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _list_outdated(client: Client) -> list[str]:
    """List the services whose spec is not reconciled yet."""
    services = client.list(SERVICE, SERVICES)
    return [
        service["metadata"]["name"]
        for service in services
        if service.get("status", {}).get("observedGeneration") != service["metadata"]["generation"]
    ]


def operate() -> None:
    """Run the operator so that it renews its Lease often, and notices a loss within 0.1 s of its own time."""
    from outrider_operator.cluster import lease
    from outrider_operator.main import main as run

    lease.RENEW_EVERY_S, lease.RETRY_EVERY_S = 0.1, 0.1
    run()


if __name__ == "__main__":
    operate() if sys.argv[1:] == ["operator"] else main()
