"""A pod learns its place in a group from the variables of a LeaderWorkerSet."""

from __future__ import annotations

import pytest
from outrider_runtime.server.group_place import GroupPlace, group_place
from outrider_runtime.server.server_errors import StartupError

OF_A_WORKER = {"LWS_LEADER_ADDRESS": "chat-nodes-0.chat-nodes.default", "LWS_WORKER_INDEX": "1"}


def test_a_replica_of_one_pod_has_no_place() -> None:
    assert group_place(1, OF_A_WORKER) is None


def test_the_leader_starts_the_server_and_its_workers_do_not() -> None:
    leader = group_place(2, OF_A_WORKER | {"LWS_WORKER_INDEX": "0"})
    worker = group_place(2, OF_A_WORKER)
    assert leader is not None
    assert worker is not None
    assert (leader.is_leader, worker.is_leader) == (True, False)
    assert "--headless" not in leader.arguments
    assert worker.arguments == [
        "--distributed-executor-backend=mp",
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=chat-nodes-0.chat-nodes.default",
        "--master-port=29501",
        "--headless",
    ]


def test_processes_of_one_machine_meet_at_a_port_of_their_own() -> None:
    assert group_place(2, OF_A_WORKER | {"MASTER_PORT": "4000"}) == GroupPlace(
        2, 1, OF_A_WORKER["LWS_LEADER_ADDRESS"], 4000
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"LWS_LEADER_ADDRESS": "a"},
        OF_A_WORKER | {"LWS_WORKER_INDEX": "2"},
        OF_A_WORKER | {"LWS_WORKER_INDEX": "-1"},
        OF_A_WORKER | {"LWS_WORKER_INDEX": "\u00b2"},
        OF_A_WORKER | {"MASTER_PORT": "any"},
    ],
)
def test_a_pod_that_no_leader_worker_set_made_says_so(wrong: dict[str, str]) -> None:
    """A wait for ranks that never come would look like a slow start."""
    with pytest.raises(StartupError, match="a LeaderWorkerSet sets them"):
        group_place(2, wrong)
