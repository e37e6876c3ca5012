"""The place of a pod in a group whose pods share one target (`engine.nodes` above 1).

The controller of LeaderWorkerSets sets the variables. Without Kubernetes they can be set by hand, one process a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider_runtime.server.server_errors import StartupError

LEADER_ADDRESS, WORKER_INDEX = "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"
"""Variables of a LeaderWorkerSet's pods."""
MEETING_PORT = "MASTER_PORT"
"""Variable with the leader's port at which the ranks meet, as PyTorch's own launchers name it."""
_DEFAULT_PORT = 29501  # vLLM's default


@dataclass(frozen=True, slots=True)
class GroupPlace:
    nodes: int
    rank: int
    """0: the leader, which serves."""
    leader: str
    """Host name or address."""
    port: int
    """Port of the leader at which the ranks meet."""

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def arguments(self) -> list[str]:
        """Arguments of vLLM's server. With several nodes it starts no other executor than its own."""
        return [
            "--distributed-executor-backend=mp",
            f"--nnodes={self.nodes}",
            f"--node-rank={self.rank}",
            f"--master-addr={self.leader}",
            f"--master-port={self.port}",
            *([] if self.is_leader else ["--headless"]),
        ]


def group_place(nodes: int, environ: Mapping[str, str]) -> GroupPlace | None:
    """Return the place of this process; None where a replica is one pod. Raises StartupError without the variables."""
    if nodes == 1:
        return None
    leader, rank = environ.get(LEADER_ADDRESS, ""), environ.get(WORKER_INDEX, "")
    port = environ.get(MEETING_PORT) or str(_DEFAULT_PORT)
    if not leader or not rank.isdecimal() or int(rank) >= nodes or not port.isdecimal():
        raise StartupError(
            f"engine.nodes is {nodes}, and {LEADER_ADDRESS}={leader!r}, {WORKER_INDEX}={rank!r} name no place in a "
            f"group of {nodes}: a LeaderWorkerSet sets them; without Kubernetes, start a process for each node and set "
            "them to the address of the first and to 0 and up"
        )
    return GroupPlace(nodes, int(rank), leader, int(port))
