"""Folders and files of a cluster.

The state folder is on disk and outlives the cluster (logs, kubeconfig). What must not, stands in
VOLATILE: a tmpfs of the cluster's own mount namespace, gone when its last process is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

VOLATILE = Path("/run")
MODELS = Path("/srv/models")
"""Folder of the cached models on the nodes: a hostPath source names a folder under it."""


@dataclass(frozen=True)
class Layout:
    """The files of the cluster whose state folder this is."""

    state: Path

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the machine, with all rights."""
        return self.state / "kubeconfig"

    @property
    def lock(self) -> Path:
        """Held as long as the cluster lives."""
        return self.state / "lock"

    @property
    def record(self) -> Path:
        """What another process needs to find the cluster: see record.py."""
        return self.state / "cluster.json"

    @property
    def control(self) -> Path:
        """The supervisor's socket."""
        return self.state / "control"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def certificates(self) -> Path:
        return self.state / "certificates"

    @property
    def audit(self) -> Path:
        """One JSON line for each write that the API server took."""
        return self.logs / "audit.log"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def certificate(self, name: str) -> Path:
        return self.certificates / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.certificates / f"{name}.key"

    def component_kubeconfig(self, name: str) -> Path:
        return self.certificates / f"{name}.kubeconfig"

    def node(self, name: str) -> Path:
        """The kubelet's folder: on disk, because pods' emptyDirs live there."""
        return self.state / "nodes" / name
