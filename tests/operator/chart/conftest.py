"""A cluster of the chart's own: it brings the CRD and the operator, which the session's cluster has from elsewhere."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.spec import ClusterSpec


@pytest.fixture(scope="module")
def bare(own_cluster_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    """A cluster of one node with nothing of Outrider's. (`own_cluster_folder` skips where there can be none.)"""
    del own_cluster_folder
    with Cluster(ClusterSpec(nodes=1), Path(tmp_path_factory.mktemp("chart-cluster"))) as started:
        yield started
