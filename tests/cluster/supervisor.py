"""Process 1 of a cluster: builds it inside its namespaces, then answers the machine's requests.

Started by cluster.py as `unshare --net --pid --mount ... python -m tests.cluster.supervisor STATE LEASE`.
When it ends, whatever the reason, the kernel ends every process, mount and network of the cluster.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster import certificates, cgroups, control, control_plane, network, sandbox
from tests.cluster.errors import ClusterError
from tests.cluster.layout import Layout
from tests.cluster.node import Node, prepare_images
from tests.cluster.processes import Processes, ignore_terminal
from tests.cluster.spec import NodeSpec
from tests.cluster.subnets import Subnets

KEEP = b"keep"
"""What the owner writes into the lease when the cluster shall outlive it."""
_READY_S = 120.0

Progress = Callable[[str], None]


def watch_lease(lease: int) -> None:
    """End the cluster when its owner does: the kernel closes the owner's end of the pipe."""
    if os.read(lease, len(KEEP)) != KEEP:
        os._exit(1)


class Supervisor:
    """The cluster's parts, and the commands that they take."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._processes = Processes(layout.logs)
        self._nodes: dict[str, Node] = {}
        self._subnets = Subnets(0)
        self._binaries = Path()
        self._cgroup = ""
        self._image_names: list[str] = []

    def serve(self) -> None:
        """Answer one request at a time, for ever; between them reap what containers leave."""
        server = control.listen(self._layout.control)
        while True:
            self._processes.reap_orphans()
            if select.select([server], [], [], 1.0)[0]:
                connection, _ = server.accept()
                with connection:
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection.makefile("rw") as stream:

            def send(**reply: Any) -> None:
                stream.write(json.dumps(reply) + "\n")
                stream.flush()

            try:
                request = json.loads(stream.readline())
                handler = getattr(self, "do_" + request.pop("do"))
                send(result=handler(progress=lambda text: send(progress=text), **request))
            except (BrokenPipeError, json.JSONDecodeError):
                return  # the asker left
            except (ClusterError, OSError) as error:
                send(error=str(error))

    def do_build(
        self, progress: Progress, binaries: str, subnets: int, cgroup: str, nodes: list[dict[str, Any]]
    ) -> None:
        """Bring the whole cluster up; the machine waits for its nodes to be Ready."""
        self._binaries, self._subnets, self._cgroup = Path(binaries), Subnets(subnets), cgroup
        cgroups.create(cgroup)
        network.build_inside(self._subnets)
        certificates.sign_control_plane(self._layout, self._binaries, self._subnets)
        control_plane.write_audit_policy(self._layout)
        self._start_first(control_plane.ETCD, control_plane.etcd(self._binaries))
        self._start_api_server()
        prepare_images(self._binaries)
        for spec in nodes:
            self._begin_node(NodeSpec(**spec))
        progress("waiting for the API server")
        self._wait_for_api_server()
        for name, command in control_plane.api_server_companions(self._binaries, self._layout, self._subnets).items():
            self._start_first(name, command)
        for node in self._nodes.values():
            progress(f"starting {node.spec.name}")
            node.join(self._processes)

    def do_add_node(self, progress: Progress, node: dict[str, Any]) -> None:
        """One more node; every tag that was imported is there too."""
        spec = NodeSpec(**node)
        if spec.name in self._nodes:
            raise ClusterError(f"There is a {spec.name} already.")
        progress(f"starting {spec.name}")
        self._begin_node(spec)
        node_added = self._nodes[spec.name]
        node_added.join(self._processes)
        for name in self._image_names:
            node_added.add_image_name(name)

    def do_import_image(self, progress: Progress, name: str) -> None:
        """Give the image one more name on every node."""
        del progress
        for node in self._nodes.values():
            node.add_image_name(name)
        self._image_names.append(name)

    def do_load_image(self, progress: Progress, node: str, archive: str) -> None:
        """Import an image that was built, on one node."""
        del progress
        self._nodes[node].load_image(archive)

    def do_kill(self, progress: Progress, process: str) -> None:
        """End a process at once, as a crash would."""
        del progress
        self._processes.kill(process)

    def do_restart_api_server(self, progress: Progress) -> None:
        progress("waiting for the API server")
        self._start_api_server()
        self._wait_for_api_server()

    def do_status(self, progress: Progress) -> dict[str, Any]:
        del progress
        return {"running": self._processes.names(), "dead": self._processes.dead()}

    def _begin_node(self, spec: NodeSpec) -> None:
        node = Node(spec, self._layout, self._subnets, self._binaries, self._cgroup)
        node.begin(self._processes)
        self._nodes[spec.name] = node

    def _start_api_server(self) -> None:
        command = control_plane.api_server(self._binaries, self._layout, self._subnets)
        self._start_first(control_plane.API_SERVER, command)

    def _start_first(self, name: str, command: list[str]) -> None:
        """Priority over pods on the processor: a real control plane has machines of its own."""
        self._processes.start(name, ["nice", "--adjustment=-10", *command])

    def _wait_for_api_server(self) -> None:
        """Ready by status 200: the text "ok" comes before the RBAC roles are there."""
        url, opener = f"{self._subnets.server}/readyz", certificates.opener(self._layout)

        def ready() -> bool:
            try:
                with opener.open(url, timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        self._processes.wait_until("The API server", ready, _READY_S)


def main() -> None:
    """Arguments: the state folder, the descriptor of the lease's reading end."""
    layout, lease = Layout(Path(sys.argv[1])), int(sys.argv[2])
    ignore_terminal()
    threading.Thread(target=watch_lease, args=(lease,), daemon=True).start()
    started = time.monotonic()
    sandbox.build()
    print(f"namespaces built in {time.monotonic() - started:.2f} s", flush=True)
    Supervisor(layout).serve()


if __name__ == "__main__":
    main()
