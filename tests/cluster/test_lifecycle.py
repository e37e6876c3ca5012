"""A cluster leaves nothing behind, whatever ends it, and runs next to other clusters."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from setup.steps import REPOSITORY
from tests.cluster import cgroups
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.network import ip
from tests.cluster.subnets import Subnets

pytestmark = pytest.mark.cluster
_COMES_BACK_S = 120.0
"""A node's taint goes a minute after the API server came back, which an earlier test may have taken away."""
_GONE_S = 120.0
"""Seconds that a cluster has to end."""
_OWNER = """
import sys, time
from pathlib import Path
from tests.cluster.cluster import Cluster
cluster = Cluster(state=Path(sys.argv[1]))
cluster.start()
cluster.kubectl("run", "left", "--image=outrider.local/standin:dev", "--command", "--", "sleep", "600")
cluster.kubectl("wait", "pod/left", "--for=condition=Ready", "--timeout=120s")
print(cluster.add_node(product="NVIDIA-L4"), flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class Traces:
    """What of a running cluster could stay behind on this machine."""

    process_namespace: str
    interface_index: str
    subnets: Subnets
    cgroup: str

    @classmethod
    def of(cls, cluster: Cluster, pid: int) -> Traces:
        subnets = cluster.subnets
        index = Path("/sys/class/net", subnets.interface, "ifindex").read_text()
        return cls(str(Path(f"/proc/{pid}/ns/pid_for_children").readlink()), index, subnets, cgroups.name_of(pid))

    def assert_gone(self) -> None:
        """No process, link, route, mount; a cgroup without processes may stay."""
        deadline = time.monotonic() + _GONE_S  # the kernel ends namespaces a moment after their first process
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []

    def _left(self) -> list[str]:
        left = [f"process {pid}" for pid in _processes_in(self.process_namespace)] + self._link_left()
        for folder in cgroups.folders():
            if folder.name == self.cgroup:
                left += [str(path) for path in folder.rglob("cgroup.procs") if _holds_processes(path)]
        return left

    def _link_left(self) -> list[str]:
        """The machine's end of the link and its routes; the kernel may take them away while this looks."""
        interface = self.subnets.interface
        try:
            index = Path("/sys/class/net", interface, "ifindex").read_text()
        except OSError:
            return []
        if index != self.interface_index:
            return []  # another cluster's
        routes = ip("route", "show").splitlines()
        return [interface, *(route for route in routes if f" dev {interface} " in f"{route} ")]


def _holds_processes(procs: Path) -> bool:
    try:
        return procs.read_text().strip() != ""
    except OSError:
        return False  # the cgroup was removed meanwhile


def _processes_in(namespace: str) -> list[int]:
    remains = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if str((folder / "ns" / "pid").readlink()) == namespace:
                    remains.append(int(folder.name))
            except OSError:
                continue  # it ended meanwhile
    return remains


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


@pytest.fixture
def owner(tmp_path: Path, cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns a cluster of its own, in tmp_path, while the session's runs."""
    assert cluster.is_running()
    command = [sys.executable, "-c", _OWNER, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdout is not None
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    Cluster(state=tmp_path).stop()


def test_killed_owner_ends_its_own_cluster_and_no_other(
    owner: subprocess.Popen[str], tmp_path: Path, cluster: Cluster
) -> None:
    """`kill -9` of a test session or of the demo must not leave pods that swallow the next one's traffic."""
    mounts = _mounts()
    assert owner.stdout is not None
    assert owner.stdout.readline().strip() == "node-2"
    second = Cluster(state=tmp_path)
    assert second.subnets != cluster.subnets
    assert second.ready_nodes() == {"node-1", "node-2"}
    assert not cluster.exists("pod", "left")
    traces = Traces.of(second, second.first_process())
    assert _processes_in(traces.process_namespace) != []

    owner.kill()
    traces.assert_gone()
    # `unshare` itself holds the lock for a moment more than what it started.
    second.wait_until("its end", lambda: not second.is_running(), _GONE_S)
    assert _mounts() == mounts
    cluster.wait_until("node-1 takes pods", lambda: "node-1" in cluster.ready_nodes(), _COMES_BACK_S)

    second.stop()
    assert [folder for folder in cgroups.folders() if folder.name == traces.cgroup] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "logs"]


def _hear_ctrl_c() -> None:
    """A job in the background ignores Ctrl-C, and so would all that it starts; a CI may run these tests as one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_while_a_cluster_starts_leaves_nothing(tmp_path: Path) -> None:
    """The shell's own cluster, interrupted half-way."""
    command = [sys.executable, "-m", "tests.cluster", "--state", str(tmp_path), "up"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, preexec_fn=_hear_ctrl_c
    )  # fmt: skip
    cluster = Cluster(state=tmp_path)
    assert process.stderr is not None
    assert "API server" in process.stderr.readline()
    traces = Traces.of(cluster, cluster.first_process())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=_GONE_S) == 130
    assert "nothing of the cluster is left" in process.stderr.read()
    process.stderr.close()
    traces.assert_gone()
    assert not cluster.is_running()


def test_a_second_start_in_the_same_folder_is_refused(cluster: Cluster) -> None:
    """Otherwise the second cluster would end the nodes of the first."""
    with pytest.raises(ClusterError, match=r"A cluster runs in .*down` ends it"):
        Cluster(state=cluster.layout.state).start()
    cluster.wait_until("node-1 takes pods", lambda: "node-1" in cluster.ready_nodes(), _COMES_BACK_S)
