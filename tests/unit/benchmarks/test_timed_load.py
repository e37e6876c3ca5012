"""Requests that come at times of their own, by the machine's clock, against a server that answers at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.evidence.plan import Planned, Point
from tests.benchmarks.evidence.speedometer import MachineClock
from tests.benchmarks.evidence.timed_load import send_timed

REQUESTS = (Planned("one", "a", at_s=0.0), Planned("two", "a", at_s=0.1, slo_class="tight"))


class Handler(BaseHTTPRequestHandler):
    SLOW_S = 0.1
    protocol_version = "HTTP/1.1"  # keeps connections where the client does
    bodies: list[dict[str, Any]]
    clients: list[Any]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.clients.append(self.client_address)
        if body["messages"][0]["content"] == "bad":
            self.send_error(400, "no such thing")
            return
        chunks: list[dict[str, Any]] = [
            {"choices": [{}]}, {"choices": [{}]}, {"choices": [], "usage": {"completion_tokens": 7}},
        ]  # fmt: skip
        time.sleep(self.SLOW_S if body["messages"][0]["content"] == "slow" else 0)
        answer = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Handler.bodies, Handler.clients = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def clock(tmp_path: Path, readings: str, usual_us: float = 100.0) -> MachineClock:
    """After `readings`, microseconds of the fixed work."""
    file = tmp_path / "speed.txt"
    file.write_text("")
    made = MachineClock(file, usual_us)
    file.write_text(readings)
    return made


def sent(server: ThreadingHTTPServer, by: MachineClock, *requests: Planned) -> Any:
    return send_timed(Point("p", requests), by, f"http://127.0.0.1:{server.server_port}", "m", 7)


def test_each_request_is_sent_at_its_time_and_says_what_its_user_saw(server: Any, tmp_path: Path) -> None:
    found = sent(server, clock(tmp_path, ""), *REQUESTS)
    assert found.seconds >= 0.1
    assert [(one.phase, one.slo_class, one.tokens, one.error) for one in found.outcomes] == [
        ("a", "", 7, ""), ("a", "tight", 7, ""),
    ]  # fmt: skip
    assert all(0 < one.ttft_s <= one.latency_s for one in found.outcomes)
    assert found.final
    assert [body.get("vllm_xargs") for body in Handler.bodies] == [None, {"slo_class": "tight"}]
    assert {body["max_completion_tokens"] for body in Handler.bodies} == {7}


def test_no_request_meets_a_connection_that_the_server_may_have_closed(server: Any, tmp_path: Path) -> None:
    sent(server, clock(tmp_path, ""), *REQUESTS)
    assert len(set(Handler.clients)) == len(REQUESTS)


def test_a_request_that_is_refused_says_why(server: Any, tmp_path: Path) -> None:
    (outcome,) = sent(server, clock(tmp_path, ""), Planned("bad", "a", at_s=0.0)).outcomes
    assert "400" in outcome.error
    assert outcome.tokens == 0


def test_a_server_that_is_gone_fails_the_request_alone(tmp_path: Path) -> None:
    point = Point("p", (Planned("one", "a", at_s=0.0),))
    (outcome,) = send_timed(point, clock(tmp_path, ""), "http://127.0.0.1:9", "m", 7).outcomes
    assert "Connect" in outcome.error


def test_a_class_is_timed_by_the_wall_clock_and_others_by_the_machines(server: Any, tmp_path: Path) -> None:
    """A class promises a TPOT by the wall clock, and a server knows no other; here the machine's hardly moves."""
    slow = clock(tmp_path, "1e9\n" * 20)
    classed, other = sent(
        server, slow, Planned("slow", "a", at_s=0.0, slo_class="tight"), Planned("slow", "a", at_s=0.0)
    ).outcomes
    assert classed.latency_s >= Handler.SLOW_S
    assert other.latency_s < Handler.SLOW_S / 10


def test_on_a_slow_machine_its_clock_is_slow(tmp_path: Path) -> None:
    wall = iter([0.0, 10.0, 20.0, 30.0])
    file = tmp_path / "speed.txt"
    file.write_text("999.0\n")
    found = MachineClock(file, 100.0, lambda: next(wall))
    assert found.now() == pytest.approx(10.0), "nothing was read since it began"
    with file.open("a") as readings:
        readings.write("200.0\n200.0\n7")
    assert found.now() == pytest.approx(15.0)
    with file.open("a") as readings:
        readings.write("8.0\n" + "50.0\n" * 10)
    assert found.now() == pytest.approx(35.0), "the half line was read whole"
