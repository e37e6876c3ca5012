"""What the operator stands on goes and comes back: its CRD, then the API server for a minute.

Last here: all services go with the CRD, and Kubernetes' own controllers take a minute more to come back.
"""

from __future__ import annotations

import time

import pytest
from outrider_crds.generate import CRD_FILE, CRD_NAME
from outrider_crds.runtime_config import CONFIG_KEY
from outrider_crds.spec import PLURAL
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT

from tests.cluster.cluster import Cluster
from tests.operator.client import uids, wait_for
from tests.operator.conftest import Make
from tests.operator.process import OperatorProcess

pytestmark = pytest.mark.cluster

AWAY_S = 60.0
"""Longer than every time-out of the operator's client."""


def test_a_crd_that_goes_and_comes_back_ends_nothing(
    make: Make, operator_process: OperatorProcess, cluster: Cluster
) -> None:
    """A reinstallation of the CRD: the same process forgets the old services, and serves the new ones."""
    service = make("again", profiling={"mode": "Skip"})
    service.wait_updated()
    cluster.kubectl("delete", "crd", CRD_NAME, "--timeout=300s", timeout_s=330)
    wait_for("no service to be known", lambda: operator_process.metric("outrider_operator_services") == 0)
    cluster.kubectl("apply", "--server-side", "-f", str(CRD_FILE))
    wait_for("the API to be served", lambda: cluster.try_kubectl("get", PLURAL, "-A").returncode == 0)
    make("again", profiling={"mode": "Skip"})
    service.wait_updated()
    assert operator_process.running()


def test_the_operator_goes_on_once_it_is_back(make: Make, operator_process: OperatorProcess, cluster: Cluster) -> None:
    """The process does not restart and deletes no pod. A change is carried out, and a new service gets its children."""
    serving = make("serving", replicas=2)
    serving.wait_updated()
    serving.wait("ProfilesReady", "True")
    before = uids(serving.pods())
    cluster.kill_apiserver()
    time.sleep(AWAY_S)
    assert operator_process.running()
    cluster.restart_apiserver()
    assert uids(serving.pods()) == before
    later = make("later", profiling={"mode": "Skip"})
    serving.patch({"speculation": {"mode": "Off"}})
    wait_for("the new service's Deployment", lambda: later.client.get(DEPLOYMENT, later.namespace, "later"))
    wait_for("the change", lambda: '"Off"' in serving.child(CONFIG_MAP, "serving-hot")["data"][CONFIG_KEY])
    assert operator_process.running()
    assert uids(serving.pods()) == before
