"""A measured server is a process of its own that leaves nothing behind."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.evidence import server as module
from tests.benchmarks.evidence.server import Server, ServerError, machine_cpu_s

ANSWERS = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def server(code: str, log: Path) -> Server:
    port = free_port()
    return Server([sys.executable, "-c", code, str(port)], {}, log, (port, free_port()))


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_stopped(*processes: int) -> None:
    """A signal reaches the others of a group a moment later."""
    deadline = time.monotonic() + 30
    while not all(map(is_stopped, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_server_and_its_children_are_gone_afterwards(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with server(ANSWERS, log) as started:
        child = int(log.read_text().split()[1])
        assert is_running(child)
        assert started.memory_mb() > 5
        assert 0 < started.cpu_s() <= machine_cpu_s()
        started.check_alive()
    assert not is_running(child)


def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    broken = server("raise SystemExit('no such model')", tmp_path / "server.log")
    with pytest.raises(ServerError, match="no such model"), broken:
        pytest.fail("it was ready")


def test_a_server_that_takes_for_ever_to_start_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it went on trying beside those that were measured, in memory that they needed."""
    monkeypatch.setattr(module, "START_S", 1.0)
    slow = server("import time; time.sleep(600)", tmp_path / "server.log")
    with pytest.raises(ServerError, match="did not start"):
        slow.wait_until_ready()
    assert not is_running(slow.process_id)


def test_a_server_that_dies_under_load_is_noticed(tmp_path: Path) -> None:
    with server(ANSWERS, tmp_path / "server.log") as started:
        os.kill(started.process_id, 9)
        while is_running(started.process_id):
            time.sleep(0.01)
        with pytest.raises(ServerError, match="ended under load"):
            started.check_alive()


def test_a_paused_server_gets_no_time_and_ends_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with server(ANSWERS, log) as started:
        child = int(log.read_text().split()[1])
        started.pause()
        wait_until_stopped(started.process_id, child)
        with started.awake():
            assert started.state() is None
        wait_until_stopped(started.process_id, child)
    assert not is_running(child)


def test_stock_vllm_has_no_state_of_ours(tmp_path: Path) -> None:
    with server(ANSWERS, tmp_path / "server.log") as started:
        assert started.state() is None
