"""pytest fixtures: a cluster for the session, or the reason why there is none.

A conftest names this module in `pytest_plugins`. With CLUSTER=existing tests use the current kubectl
context. With OUTRIDER_REQUIRE_CLUSTER=1 (make test sets it) a cluster that cannot be had is a failure:
a run that skipped half its tests must not look like one that passed.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, check_machine
from tests.cluster.errors import ClusterError, NotOurClusterError
from tests.cluster.kubectl import ExistingCluster
from tests.cluster.spec import ClusterSpec

PRODUCTS = ("NVIDIA-H200", "NVIDIA-A100-SXM4-80GB", "NVIDIA-L4")
"""A node of each, with 8 GPUs, and a plain node."""


@pytest.fixture(scope="session")
def own_cluster_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the state of a cluster of our own, on a machine that can run one."""
    if os.environ.get("CLUSTER") == "existing":
        pytest.skip("CLUSTER=existing: this test needs nodes of several GPU products, which only the rig has.")
    state = tmp_path_factory.mktemp("cluster")
    try:
        check_machine(state)
    except ClusterError as error:
        _unavailable(str(error))
    return state


@pytest.fixture(scope="session")
def cluster(own_cluster_folder: Path) -> Generator[Cluster, None, None]:
    """The session's cluster: a plain node (node-1) and one for each of PRODUCTS."""
    with Cluster(ClusterSpec(nodes=1, gpu_products=PRODUCTS), own_cluster_folder / "session") as started:
        yield started


@pytest.fixture(scope="session")
def any_cluster(request: pytest.FixtureRequest) -> Cluster | ExistingCluster:
    """The session's cluster, or with CLUSTER=existing the current kubectl context."""
    if os.environ.get("CLUSTER") == "existing":
        return ExistingCluster()
    started: Cluster = request.getfixturevalue("cluster")
    return started


def _unavailable(reason: str) -> None:
    if os.environ.get("OUTRIDER_REQUIRE_CLUSTER") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """What only our own cluster can do is skipped elsewhere, with the rig's sentence."""
    del item
    try:
        return (yield)
    except NotOurClusterError as error:
        pytest.skip(str(error))
