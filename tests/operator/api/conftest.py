"""The CustomResourceDefinition on the real API server."""

from __future__ import annotations

import pytest
from outrider_crds.generate import CRD_FILE, CRD_NAME

from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import ExistingCluster
from tests.operator.api.apply import NAMESPACE, ApiServer
from tests.operator.client import PATIENCE_S


@pytest.fixture(scope="session")
def api(any_cluster: Cluster | ExistingCluster) -> Cluster | ExistingCluster:
    """The cluster, with Outrider's CRD established and published."""
    any_cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD_FILE))

    def established() -> bool:  # kubectl's own wait fails on a CRD that has no condition yet
        return any_cluster.try_kubectl("get", "--raw", "/apis/outrider.dev/v1alpha1").returncode == 0

    any_cluster.wait_until(f"the CRD {CRD_NAME} is established", established, PATIENCE_S)

    def explained() -> bool:
        return any_cluster.try_kubectl("explain", "specsvc.spec.draftPool").returncode == 0

    any_cluster.wait_until("the CRD is in the API server's OpenAPI document", explained, PATIENCE_S)
    return any_cluster


@pytest.fixture(scope="session")
def apiserver(api: Cluster | ExistingCluster) -> ApiServer:
    api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    return ApiServer(str(api.kubeconfig))
