"""A cluster as the machine sees it: start it, talk to it, break it, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from setup import binaries, system
from setup.steps import CACHE, REPOSITORY, SetupError, say
from tests.cluster import cgroups, control, leftovers, network, sandbox
from tests.cluster.errors import ClusterError
from tests.cluster.kubectl import Kubectl
from tests.cluster.layout import Layout
from tests.cluster.node import cni_plugins
from tests.cluster.spec import GPU_RESOURCE, ClusterSpec, NodeSpec
from tests.cluster.subnets import Subnets
from tests.cluster.supervisor import KEEP

DEFAULT_STATE = CACHE / "cluster"
_PROGRAMS = {
    "unshare": "util-linux", "mount": "mount", "ip": "iproute2", "nft": "nftables",
    "containerd": "containerd", "ctr": "containerd", "runc": "runc",
}  # fmt: skip
_READY_S = 120.0
_INOTIFY_INSTANCES = 1024


@dataclass(frozen=True)
class _Record:
    """What another process needs to find a running cluster."""

    pid: int  # of `unshare`: killing it ends the cluster
    number: int
    nodes: int


class Cluster(Kubectl):
    """One cluster in one state folder.

    Started by `start()` it dies with this process, however that ends; with `start(keep=True)` it
    lives on until some process calls `stop()` for the same folder.
    """

    manages_nodes = True

    def __init__(
        self,
        spec: ClusterSpec | None = None,
        state: Path = DEFAULT_STATE,
        progress: Callable[[str], None] = say,
    ) -> None:
        self.layout = Layout(state.expanduser().resolve())
        super().__init__(self.layout.kubeconfig)
        self._spec = spec or ClusterSpec()
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._lease: int | None = None

    # -- life ---------------------------------------------------------------

    def start(self, *, keep: bool = False) -> None:
        """Return when every node is Ready; on any failure nothing of the cluster is left."""
        began = time.monotonic()
        check_machine(self.layout.state)
        _allow_watches()
        programs = _binaries()
        lock = leftovers.take_lock(self.layout)
        if lock is None:
            raise ClusterError(f"A cluster runs in {self.layout.state}: `python -m tests.cluster down` ends it.")
        try:
            self._launch(lock)
            self._build(programs)
            self._wait_until_ready(self._spec.node_specs())
        except BaseException:
            self.stop()
            raise
        if keep and self._lease is not None:
            os.write(self._lease, KEEP)
        self._progress(f"cluster Ready after {time.monotonic() - began:.1f} s; KUBECONFIG={self.kubeconfig}")

    def stop(self) -> None:
        """End it and remove what it leaves, logs aside. Nothing happens where none runs."""
        record = self._record()
        if record is not None and leftovers.is_alive(self.layout):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)  # and with it, by --kill-child, its namespaces
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._lease is not None:
            os.close(self._lease)
        self._process = self._lease = None
        self._clear(record)

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def is_running(self) -> bool:
        return leftovers.is_alive(self.layout)

    def first_process(self) -> int:
        """Its process on this machine: whose end is the cluster's end."""
        return self._expect_record().pid

    # -- what can be done to it -----------------------------------------------

    @property
    def subnets(self) -> Subnets:
        return Subnets(self._expect_record().number)

    @property
    def machine_address(self) -> str:
        """Address at which pods reach what listens on this machine, 0.0.0.0 included."""
        return str(self.subnets.machine)

    def add_node(
        self, product: str | None = None, gpus: int = ClusterSpec.gpus, *, own_images: bool = False,
        mounts_images: bool = False,
    ) -> str:  # fmt: skip
        """One more node, Ready; its name. own_images: its containers see nothing of this machine. mounts_images: it has
        a containerd that mounts images as volumes."""
        record = self._expect_record()
        containerd = str(binaries.containerd()) if mounts_images else ""
        node = NodeSpec(record.nodes, product, gpus, own_images, containerd)
        self._ask({"do": "add_node", "node": node.to_json()})
        self._write_record(replace(record, nodes=record.nodes + 1))
        self._wait_until_ready([node])
        return node.name

    def import_image(self, name: str) -> None:
        """Give the checkout's image one more name, on every node: outrider.local/runtime-cpu:next."""
        self._ask({"do": "import_image", "name": name})

    def load_image(self, node: str, archive: Path) -> None:
        """Bring an image that was built to a node with `own_images`."""
        self._ask({"do": "load_image", "node": node, "archive": str(archive)})

    def kill_apiserver(self) -> None:
        """Kill the API server; pods run on."""
        self._ask({"do": "kill", "process": "kube-apiserver"})

    def restart_apiserver(self) -> None:
        """Start the API server again on the data that it had, and wait until it is ready."""
        self._ask({"do": "restart_api_server"})

    def kill_node(self, name: str) -> None:
        """Kill the kubelet of that node: after 40 s the node is NotReady."""
        self._ask({"do": "kill", "process": f"kubelet-{name}"})

    def status(self) -> dict[str, Any]:
        """Return which of its processes run, and which ended with what exit status."""
        return dict(self._ask({"do": "status"}))

    # -- how -----------------------------------------------------------------

    def _launch(self, lock: int) -> None:
        """Start process 1 in namespaces of its own; the lock is its from now on."""
        try:
            cgroups.remove_dead()
            leftovers.clear_state(self.layout, keep_logs=False)
            self.layout.logs.mkdir(parents=True)
            self._process, self._lease = _unshare(self.layout, lock)
        finally:
            os.close(lock)

    def _build(self, programs: Path) -> None:
        """Wait for process 1, link its network to this machine's, and have it build the rest."""
        assert self._process is not None
        pid = self._process.pid
        self._write_record(_Record(pid, number=-1, nodes=0))
        self._ask({"do": "status"}, wait_s=_READY_S)
        subnets = network.link_to(pid)
        nodes = [node.to_json() for node in self._spec.node_specs()]
        self._write_record(_Record(pid, subnets.number, len(nodes)))
        self._ask(
            {
                "do": "build",
                "binaries": str(programs),
                "subnets": subnets.number,
                "cgroup": cgroups.name_of(pid),
                "nodes": nodes,
            }
        )

    def _wait_until_ready(self, nodes: list[NodeSpec]) -> None:
        """Nodes Ready and schedulable, GPUs in their capacity, a service account for pods."""
        self._progress(f"  waiting for {', '.join(node.name for node in nodes)}")
        names = {node.name for node in nodes}
        self.wait_until("every node Ready", lambda: names <= self.ready_nodes(), _READY_S)
        for node in nodes:
            if node.product is not None:
                self._set_gpus(node)
        self.wait_until("the service account of pods", lambda: self.exists("serviceaccount", "default"), _READY_S)

    def _set_gpus(self, node: NodeSpec) -> None:
        """Claim GPUs, as a device plugin would; the kubelet keeps what it does not know."""
        capacity = {GPU_RESOURCE: str(node.gpus)}
        patch = {"status": {"capacity": capacity, "allocatable": capacity}}
        self.kubectl("patch", "node", node.name, "--subresource=status", "-p", json.dumps(patch))

    def _ask(self, request: dict[str, Any], wait_s: float = 0.0) -> Any:
        return control.ask(self.layout.control, request, lambda text: self._progress(f"  {text}"), wait_s)

    def _record(self) -> _Record | None:
        try:
            return _Record(**json.loads(self.layout.record.read_text()))
        except FileNotFoundError:
            return None

    def _expect_record(self) -> _Record:
        record = self._record()
        if record is None:
            raise ClusterError(f"No cluster was started in {self.layout.state}.")
        return record

    def _write_record(self, record: _Record) -> None:
        partial = self.layout.record.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(record)))
        partial.rename(self.layout.record)

    def _clear(self, record: _Record | None) -> None:
        deadline = time.monotonic() + 60
        while self.layout.state.exists() and (lock := leftovers.take_lock(self.layout)) is None:
            if time.monotonic() > deadline:
                raise ClusterError(f"The cluster in {self.layout.state} was killed and still holds its lock.")
            time.sleep(0.02)
        if not self.layout.state.exists():
            return
        assert lock is not None
        if record is not None and record.number >= 0:
            network.unlink(Subnets(record.number))
        cgroups.remove_dead(patience_s=10)
        leftovers.clear_state(self.layout, keep_logs=True)
        os.close(lock)


def _unshare(layout: Layout, lock: int) -> tuple[subprocess.Popen[bytes], int]:
    """The process that holds the cluster's namespaces, and the lease: it dies when that is closed."""
    reading, lease = os.pipe()
    command = [
        "unshare", "--net", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child",
        sys.executable, "-m", "tests.cluster.supervisor", str(layout.state), str(reading),
    ]  # fmt: skip
    with layout.log("supervisor").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=REPOSITORY,
            pass_fds=(lock, reading), start_new_session=True,
        )  # fmt: skip
    os.close(reading)
    return process, lease


def check_machine(state: Path) -> None:
    """ClusterError, with what to do, where no cluster can be had."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ClusterError("The cluster needs root on Linux; elsewhere set CLUSTER=existing and a kubectl context.")
    system.extend_path()
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            raise ClusterError(f"There is no `{program}` on the PATH: `make deps` or `apt-get install {package}`.")
    if sys.prefix == sys.base_prefix:
        raise ClusterError("Run this with the virtual environment's Python, .venv/bin/python: pods run from it.")
    cni_plugins()
    sandbox.refuse_hidden(state)


def _allow_watches() -> None:
    """A node holds about twenty inotify instances; Debian's limit of 128 a user stops the sixth node's kubelet."""
    limit = Path("/proc/sys/fs/inotify/max_user_instances")
    if int(limit.read_text()) < _INOTIFY_INSTANCES:
        with contextlib.suppress(OSError):  # a container may not: then fewer nodes fit
            limit.write_text(str(_INOTIFY_INSTANCES))


def _binaries() -> Path:
    try:
        return binaries.kubernetes()
    except SetupError as error:
        raise ClusterError(str(error)) from error
