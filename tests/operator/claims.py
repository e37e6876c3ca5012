"""Claims of storage for `modelCache.pvc`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster

HUB_TARGET = {"target": {"name": "tests/hub-model"}}
"""A target that has to be downloaded."""


class Claim:
    """A claim whose volume is a new folder of this machine, which every node sees."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, name: str) -> None:
        folder.mkdir()
        folder.chmod(0o777)  # Kubernetes changes no owner in a folder of the node
        self.folder = folder
        self.field: dict[str, Any] = {"modelCache": {"pvc": {"claimName": name}}}
        volume, common = f"{namespace}-{name}", {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        spec = {**common, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder), "type": "Directory"}}
        cluster.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": spec})
        claim = {**common, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}}
        metadata, kind = {"name": name, "namespace": namespace}, "PersistentVolumeClaim"
        cluster.apply({"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": claim})
