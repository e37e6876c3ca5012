"""A worker of a group lives as long as its leader, whatever signals say meanwhile."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from outrider_runtime.server.group_worker import MOST_MISSES

LIMIT_S = 60.0
WORKER = """
import socket, sys, time
from outrider_runtime.server.group_worker import LeaderWatch

addresses, lookups = socket.getaddrinfo, []

def name_server_with_one_answer(host, *rest, **options):
    if host != "leader.test":
        return addresses(host, *rest, **options)
    lookups.append(host)
    if len(lookups) > 1:
        raise socket.gaierror(socket.EAI_AGAIN, "the name server is away")
    return addresses("127.0.0.1", *rest, **options)

socket.getaddrinfo = name_server_with_one_answer
LeaderWatch("leader.test", int(sys.argv[1]), look_every_s=0.05).start()
print("started", flush=True)
time.sleep(300)
"""


@pytest.fixture
def leader() -> Generator[socket.socket]:
    """The leader's admin port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        yield listener


@contextmanager
def worker(port: int) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WORKER, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        try:
            yield process
        finally:
            process.kill()


def looked_at(listener: socket.socket) -> None:
    """Return once the worker has looked at the leader."""
    listener.accept()[0].close()


def test_a_worker_ends_when_its_leader_is_gone(leader: socket.socket) -> None:
    with worker(leader.getsockname()[1]) as process:
        looked_at(leader)
        looked_at(leader)
        assert process.poll() is None
        leader.close()
        assert process.wait(LIMIT_S) == 1


def test_a_worker_goes_on_while_its_leader_drains(leader: socket.socket) -> None:
    """A group is deleted as a whole: every pod gets the signal, and the leader still answers requests."""
    with worker(leader.getsockname()[1]) as process:
        looked_at(leader)
        looked_at(leader)
        process.send_signal(signal.SIGTERM)
        for _ in range(5):
            looked_at(leader)
        assert process.poll() is None
        leader.close()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM


def test_worker_outlives_an_outage_of_the_name_server(leader: socket.socket) -> None:
    """Each look needed the name server: five seconds without a name server ended every replica."""
    with worker(leader.getsockname()[1]) as process:
        for _ in range(MOST_MISSES + 2):
            looked_at(leader)
        assert process.poll() is None


def test_a_worker_without_a_leader_ends_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with worker(port) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
