"""The API server goes away for a minute. Last here: Kubernetes' own controllers take another to come back."""

from __future__ import annotations

import time

import pytest
from outrider_crds.runtime_config import CONFIG_KEY
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT

from tests.cluster.cluster import Cluster
from tests.operator.client import uids, wait_for
from tests.operator.conftest import Make
from tests.operator.process import OperatorProcess

pytestmark = pytest.mark.cluster

AWAY_S = 60.0
"""Longer than every time-out of the operator's client."""


def test_the_operator_goes_on_once_it_is_back(make: Make, operator_process: OperatorProcess, cluster: Cluster) -> None:
    """The same process: no restart, no deleted pod; a change is carried out, and a new service gets its children."""
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
