"""A node: a containerd and a kubelet of its own, its CNI folder and its share of the pod range."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import images
from tests.cluster.certificates import sign_node
from tests.cluster.errors import ClusterError
from tests.cluster.layout import VOLATILE, Layout
from tests.cluster.network import add_node_address
from tests.cluster.processes import Processes, run
from tests.cluster.spec import IMAGES, NodeSpec
from tests.cluster.subnets import Subnets

_CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")
_RESOLV_CONF = VOLATILE / "resolv.conf"
BASE_SPEC = VOLATILE / "base-spec.json"
CHECKOUT_IMAGE = VOLATILE / "checkout.tar"
_PAUSE_IMAGE = VOLATILE / "pause.tar"


@dataclass(frozen=True)
class Node:
    """Starts a node inside the cluster's namespaces."""

    spec: NodeSpec
    layout: Layout
    subnets: Subnets
    binaries: Path
    cgroup: str

    @property
    def _volatile(self) -> Path:
        return VOLATILE / self.spec.name

    @property
    def _socket(self) -> Path:
        return self._volatile / "containerd.sock"

    @property
    def _folder(self) -> Path:
        """The kubelet's: that of the state folder by a short name, for it makes sockets in it, whose paths may not
        pass 107 characters."""
        return self._volatile / "kubelet"

    @property
    def _container_runtime(self) -> str:
        return f"containerd-{self.spec.name}"

    @property
    def _environment(self) -> dict[str, str]:
        """containerd, and the shims that it starts, are found here."""
        folders = (self.spec.containerd, os.environ["PATH"])
        return {**os.environ, "PATH": os.pathsep.join(filter(None, folders))}

    def begin(self, processes: Processes) -> None:
        """Start its containerd: nothing in it needs the API server."""
        add_node_address(self.subnets, self.spec.index)
        sign_node(self.layout, self.binaries, self.subnets, self.spec)
        (self._volatile / "cni").mkdir(parents=True)
        self._folder.mkdir()
        self.layout.node(self.spec.name).mkdir(parents=True)
        run(["mount", "--bind", str(self.layout.node(self.spec.name)), str(self._folder)])
        (self._volatile / "cni" / "pods.conflist").write_text(json.dumps(self._cni_config()))
        config = self._volatile / "containerd.toml"
        config.write_text(self._containerd_config())
        processes.start(self._container_runtime, ["containerd", "--config", str(config)], self._environment)

    def join(self, processes: Processes) -> None:
        """Import the images and start its kubelet."""
        processes.wait_until(f"{self.spec.name}'s containerd", self._containerd_answers, timeout_s=120)
        self.ctr("images", "import", str(_PAUSE_IMAGE))
        self.ctr("images", "import", str(CHECKOUT_IMAGE))
        config = self._volatile / "kubelet.json"
        config.write_text(json.dumps(self._kubelet_config()))
        processes.start(f"kubelet-{self.spec.name}", self._kubelet_command(config))

    def add_image_name(self, name: str) -> None:
        """One more name for the image of the checkout."""
        self.ctr("images", "tag", "--force", IMAGES[0], name)

    def load_image(self, archive: str) -> None:
        """Import what `docker save` wrote."""
        self.ctr("images", "import", archive)

    def ctr(self, *arguments: str) -> str:
        """containerd's own client, in Kubernetes' namespace."""
        return run(["ctr", "--address", str(self._socket), "--namespace", "k8s.io", *arguments])

    def _containerd_answers(self) -> bool:
        try:
            self.ctr("version")
        except ClusterError:
            return False
        return True

    def _cni_config(self) -> dict[str, Any]:
        ranges = [[{"subnet": str(self.subnets.pods_of(self.spec.index))}]]
        addresses = {
            "type": "host-local",
            "dataDir": str(self._volatile / "cni-addresses"),
            "ranges": ranges,
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": addresses}]}

    def _containerd_config(self) -> str:
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        # Images that were built are too large for memory.
        root = self.layout.node(self.spec.name) if self.spec.own_images else self._volatile
        return f"""
version = 2
root = "{root}/containerd-root"
state = "{self._volatile}/containerd-state"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{self._socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{self._volatile}/containerd-opt"
[{cri}]
  sandbox_image = "{images.PAUSE}"
  restrict_oom_score_adj = true
  disable_hugetlb_controller = true
[{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "{"" if self.spec.own_images else BASE_SPEC}"
[{cri}.cni]
  bin_dir = "{cni_plugins()}"
  conf_dir = "{self._volatile}/cni"
"""

    def _kubelet_config(self) -> dict[str, Any]:
        address = str(self.subnets.node(self.spec.index))
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": address,
            "healthzBindAddress": address,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": str(self.layout.certificate("ca"))},
            },
            "authorization": {"mode": "AlwaysAllow"},  # of the API server alone: it has the only certificate
            "tlsCertFile": str(self.layout.certificate(self.spec.name)),
            "tlsPrivateKeyFile": str(self.layout.key(self.spec.name)),
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,  # an image that was imported cannot be pulled again
            "configMapAndSecretChangeDetectionStrategy": "Watch",
            "syncFrequency": "1s",  # how soon a changed ConfigMap is in its pods; 1 min by default
            "volumeStatsAggPeriod": "5s",  # how soon a volume beyond its limit is seen; 1 min by default
            "podLogsDir": str(self._folder / "pod-logs"),
            "volumePluginDir": str(self._folder / "volume-plugins"),
            "makeIPTablesUtilChains": False,
            "clusterDNS": ["127.0.0.1"],  # there is none: look-ups fail at once
            "resolvConf": str(_RESOLV_CONF),
        }

    def _kubelet_command(self, config: Path) -> list[str]:
        labels = ",".join(f"{key}={value}" for key, value in self.spec.labels.items())
        return [
            str(self.binaries / "kubelet"),
            f"--config={config}",
            f"--kubeconfig={self.layout.component_kubeconfig(self.spec.name)}",
            f"--hostname-override={self.spec.name}",
            f"--node-ip={self.subnets.node(self.spec.index)}",
            f"--root-dir={self._folder}",
            f"--node-labels={labels}",
        ]


def prepare_images(binaries: Path) -> None:
    """What every node imports and every container is made from."""
    images.write_pause_image(_PAUSE_IMAGE, binaries / "pause")
    images.write_checkout_image(CHECKOUT_IMAGE, IMAGES)
    BASE_SPEC.write_text(json.dumps(images.base_spec(json.loads(run(["ctr", "oci", "spec"])))))


def cni_plugins() -> str:
    """The folder with the CNI plugins that the rig uses."""
    for folder in _CNI_FOLDERS:
        if shutil.which("ptp", path=folder) and shutil.which("host-local", path=folder):
            return folder
    raise ClusterError(f"No CNI plugins in {', '.join(_CNI_FOLDERS)}: `apt-get install containernetworking-plugins`.")
