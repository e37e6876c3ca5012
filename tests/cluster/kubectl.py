"""kubectl and helm, bound to one kubeconfig, and the few questions that every test asks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setup import binaries, system
from tests.cluster.errors import ClusterError, NotOurClusterError


class Kubectl:
    """Talks to the API server through kubectl and helm."""

    def __init__(self, kubeconfig: Path | None) -> None:
        self._kubeconfig = kubeconfig

    @property
    def kubeconfig(self) -> Path:
        """A file that kubectl, helm and client libraries can be given."""
        if self._kubeconfig is not None:
            return self._kubeconfig
        return Path(os.environ.get("KUBECONFIG", "~/.kube/config").split(":")[0]).expanduser()

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, with KUBECONFIG and with kubectl, helm and prometheus on the PATH."""
        path = os.environ.get("PATH", "")
        ours = (binaries.kubernetes_folder(), binaries.helm_folder(), system.prometheus_folder())
        folders = [str(folder) for folder in ours if folder.exists()]
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": ":".join([*folders, path])}

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        """Its output; ClusterError with its error output when it ends with another status than 0."""
        done = self.try_kubectl(*arguments, stdin=stdin, timeout_s=timeout_s)
        if done.returncode != 0:
            raise ClusterError(f"`kubectl {' '.join(arguments)}` ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def try_kubectl(
        self, *arguments: str, stdin: str | None = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """The finished call, whatever its status: for what is expected to be refused."""
        environment = self.environment
        program = shutil.which("kubectl", path=environment["PATH"])
        if program is None:
            raise ClusterError("There is no kubectl: `make deps` builds one.")
        return subprocess.run(
            [program, *arguments],
            input=stdin, capture_output=True, text=True, check=False, env=environment, timeout=timeout_s,
        )  # fmt: skip

    def helm(self, *arguments: str) -> str:
        """Its output; ClusterError with its error output when it fails."""
        environment = self.environment
        program = shutil.which("helm", path=environment["PATH"])
        if program is None:
            raise ClusterError("There is no helm: `make deps` builds one.")
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            raise ClusterError(f"`helm {' '.join(arguments)}` failed: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *manifests: dict[str, Any]) -> None:
        """`kubectl apply` of objects given as dicts."""
        content = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self.kubectl("apply", "-f", "-", stdin=content)

    def get(self, kind: str, name: str | None = None, namespace: str = "default", selector: str = "") -> Any:
        """One object, or the list of a kind's items."""
        arguments = ["get", kind, "-n", namespace, "-o", "json"]
        if name is not None:
            return json.loads(self.kubectl(*arguments, name))
        if selector:
            arguments.append(f"--selector={selector}")
        return json.loads(self.kubectl(*arguments))["items"]

    def exists(self, kind: str, name: str, namespace: str = "default") -> bool:
        return self.try_kubectl("get", kind, name, "-n", namespace, "--ignore-not-found", "-o", "name").stdout != ""

    def wait_until(self, what: str, condition: Callable[[], bool], timeout_s: float, every_s: float = 0.2) -> None:
        """Poll; ClusterError that names what never came."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise ClusterError(f"Waited {timeout_s:.0f} s for {what}, in vain.")
            time.sleep(every_s)

    def wait_established(self, *custom_resources: str) -> None:
        """Wait for definitions, named as for `kubectl wait`, which fails at once where one has no conditions yet."""
        wait = ("wait", "--for=condition=Established", "--timeout=30s", *custom_resources)
        self.wait_until("the CRDs", lambda: self.try_kubectl(*wait).returncode == 0, timeout_s=300)

    def node_names(self) -> list[str]:
        return [node["metadata"]["name"] for node in self.get("nodes")]

    def ready_nodes(self) -> set[str]:
        """Names of the nodes that take pods: Ready and without a taint."""
        return {node["metadata"]["name"] for node in self.get("nodes") if _takes_pods(node)}


def _takes_pods(node: dict[str, Any]) -> bool:
    conditions = {entry["type"]: entry["status"] for entry in node.get("status", {}).get("conditions", [])}
    return conditions.get("Ready") == "True" and not node["spec"].get("taints")


class ExistingCluster(Kubectl):
    """The current kubectl context, for CLUSTER=existing: what this rig cannot do there, it refuses."""

    manages_nodes = False

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def machine_address(self) -> str:
        raise self._cannot("reach this machine from pods")

    def add_node(self, product: str | None = None, gpus: int = 0) -> str:
        raise self._cannot(f"add a node with {gpus} of {product}")

    def import_image(self, name: str) -> None:
        raise self._cannot(f"import {name}")

    def kill_apiserver(self) -> None:
        raise self._cannot("kill the API server")

    def restart_apiserver(self) -> None:
        raise self._cannot("restart the API server")

    def _cannot(self, what: str) -> NotOurClusterError:
        return NotOurClusterError(f"CLUSTER=existing: the rig did not start this cluster, so it cannot {what}.")
