"""`kubectl outrider`: one screen each, of a status that the operator's own decisions wrote."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from outrider_crds.kubectl_plugin import main, painter

from tests.unit.operator.decide.world import EAGLE, PLD, World, manifest

WORDS = "42 requests, prompt lookup pays"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A service, and in kubectl's place a program that prints it: the cluster's tests use the real one."""
    world = World(manifest(draftPool=[PLD, EAGLE]))
    world.serve()
    _write_kubectl(tmp_path, world)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return world


def _write_kubectl(folder: Path, world: World) -> None:
    pods = [{**pod, "metadata": {"namespace": "default", **pod["metadata"]}} for pod in world.pods.values()]
    (folder / "service.json").write_text(json.dumps(world.services["chat"]))
    (folder / "pods.json").write_text(json.dumps({"items": pods}))
    script = f"""#!/bin/sh
case "$*" in
  *specsvc\\ chat*) cat {folder}/service.json;;
  *proxy/outrider/why*) echo "{WORDS}";;
  *pods*) cat {folder}/pods.json;;
  *) echo 'Error from server (NotFound): it is not there' >&2; exit 1;;
esac
"""
    (folder / "kubectl").write_text(script)
    (folder / "kubectl").chmod(stat.S_IRWXU)


def _screen(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_status_is_one_screen_with_each_condition(service: World, capsys: pytest.CaptureFixture[str]) -> None:
    screen = _screen(capsys, "status", "chat")
    assert "1 ready (spec: 1)" in screen
    for condition in service.services["chat"]["status"]["conditions"]:
        assert f"{condition['type']} " in screen
    assert len(screen.splitlines()) < 40


def test_output_into_a_pipe_has_no_colours(service: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Logs and scripts were full of escape sequences with other tools."""
    del service
    assert "\x1b" not in _screen(capsys, "status", "chat")


@pytest.mark.parametrize(("is_terminal", "environment", "is_painted"), [
    (True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"NO_COLOR": ""}, True),
])  # fmt: skip
def test_colours_are_for_terminals(is_terminal: bool, environment: dict[str, str], is_painted: bool) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    assert ("\x1b" in painter(stream, environment)("text", "31")) is is_painted


def test_why_shows_what_is_wrong_and_what_a_pod_decides(
    service: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = _screen(capsys, "why", "chat")
    assert "Nothing is wrong." in screen
    assert WORDS in screen
    for pod in service.pods.values():
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    service.settle()
    _write_kubectl(tmp_path, service)
    screen = _screen(capsys, "why", "chat")
    assert "NoReadyEndpoint" in screen
    assert "Accepted" not in screen
    assert "No pod is ready" in screen


def test_why_asks_an_existing_pod_where_it_serves(
    service: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    existing = {"podSelector": {"matchLabels": {"app": "llama"}}, "port": 8200, "scheme": "HTTPS"}
    service.services["chat"]["spec"]["workload"] = {"existing": existing}
    service.services["chat"]["status"]["replicas"] = 3
    _write_kubectl(tmp_path, service)
    assert "1 ready (selected: 3)" in _screen(capsys, "status", "chat")
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(kubectl.read_text().replace(f'echo "{WORDS}"', 'echo "$*"'))
    (pod,) = service.pods
    assert f"/pods/https:{pod}:8200/proxy/outrider/why" in _screen(capsys, "why", "chat")


def test_why_does_not_wait_for_a_pod_for_ever(
    service: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenant's pod that never answered kept it for ever."""
    del service
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(kubectl.read_text().replace(f'echo "{WORDS}"', 'echo "$*"'))
    assert "--request-timeout=10s" in _screen(capsys, "why", "chat")


@pytest.mark.parametrize("stream", ["1", "2"])
def test_why_cuts_an_answer_that_has_no_end(
    service: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], stream: str
) -> None:
    """It filled the administrator's memory; an endless error as well."""
    del service
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(kubectl.read_text().replace(f'echo "{WORDS}"', f"exec yes {WORDS[:2]} >&{stream}"))
    assert 1 << 20 <= len(_screen(capsys, "why", "chat")) < 1.1 * (1 << 20)


def test_why_calls_nothing_right_while_ready_is_unknown(
    service: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said that nothing is wrong, and named no condition that is not known."""
    screen = _screen(capsys, "why", "chat")
    assert "NoTraffic" in screen
    assert "EndpointReady" not in screen
    (ready,) = (entry for entry in service.services["chat"]["status"]["conditions"] if entry["type"] == "Ready")
    ready |= {"status": "Unknown", "reason": "NodeLost"}
    _write_kubectl(tmp_path, service)
    screen = _screen(capsys, "why", "chat")
    assert "Nothing is wrong." not in screen
    assert "NodeLost" in screen


def test_drafts_profile_and_demand_are_tables(
    service: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status: dict[str, Any] = service.services["chat"]["status"]
    status["drafts"][1] |= {"acceptanceRate": "0.623", "acceptedLength": "2.4", "sharePercent": "80"}
    status["demand"] = [{"product": "cpu", "replicas": "2.31", "requests": 40, "tokensPerSecond": "1500"}]
    _write_kubectl(tmp_path, service)
    assert "62.3%" in _screen(capsys, "drafts", "chat")
    assert "cpu" in _screen(capsys, "profile", "chat")
    assert "2.31" in _screen(capsys, "demand", "chat")
    del status["demand"]
    _write_kubectl(tmp_path, service)
    assert "not known" in _screen(capsys, "demand", "chat")


def test_adapters_that_a_pod_lacks_are_named(
    service: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` has a line of them, `adapters` a row of each with what went wrong."""
    assert "\nadapters " not in _screen(capsys, "status", "chat")
    service.services["chat"]["status"]["adapters"] = [
        {"name": "support", "loaded": True, "pods": "1/1", "acceptanceRate": "0.5", "requests": 7},
        {"name": "legal", "pods": "0/1", "reason": "rank 32"},
    ]
    _write_kubectl(tmp_path, service)
    assert "1 of 2 loaded; not legal (0/1)" in _screen(capsys, "status", "chat")
    rows = _screen(capsys, "adapters", "chat").splitlines()
    assert "50%" in rows[1]
    assert rows[2].split() == ["legal", "0/1", "0", "rank", "32"]


COMMANDS = ("status", "why", "drafts", "adapters", "profile", "demand")


def test_screens_say_what_an_unseen_service_is(
    service: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`why` said "Nothing is wrong." of a service without a status, and of one with an older generation's."""
    document = service.services["chat"]
    document["metadata"]["generation"] += 1
    two_hours_ago = datetime.now(UTC) - timedelta(hours=2, minutes=1)
    document["metadata"]["managedFields"] = [
        {"manager": "outrider", "subresource": "status", "time": two_hours_ago.isoformat(timespec="seconds")},
        {"manager": "another", "subresource": "status"},
    ]
    _write_kubectl(tmp_path, service)
    for command in COMMANDS:
        screen = _screen(capsys, command, "chat")
        assert "has not looked at generation 2 yet; this is of generation 1." in screen
        assert "last written 2 h ago" in screen
        assert "Nothing is wrong" not in screen
    for status in ({}, {"observedGeneration": -1}):
        document["status"] = status
        _write_kubectl(tmp_path, service)
        for command in COMMANDS:
            screen = _screen(capsys, command, "chat")
            assert "The operator has not looked at this service yet." in screen
            assert "Nothing is wrong" not in screen


def test_screens_hold_no_control_characters_of_pods(
    service: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pod's last words set the title of an administrator's terminal and cleared it."""
    attack = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e"
    for condition in service.services["chat"]["status"]["conditions"]:
        condition |= {"message": attack, "status": "False"}
    service.services["chat"]["status"]["drafts"][0]["reason"] = attack
    _write_kubectl(tmp_path, service)
    (tmp_path / "kubectl").write_text((tmp_path / "kubectl").read_text().replace(WORDS, f"{attack}\nsecond line"))
    for command in COMMANDS:
        printed = _screen(capsys, command, "chat")
        assert all(letter.isprintable() for letter in printed.replace("\n", ""))
        assert "pwned" in printed or command not in ("status", "why", "drafts")
    assert "second line" in _screen(capsys, "why", "chat").splitlines()


def test_closed_pipe_ends_without_a_word(service: World) -> None:
    """`kubectl outrider status chat | head -1` printed an exception at its exit."""
    del service
    program = f"env -u PYTHONUNBUFFERED {sys.executable} -m outrider_crds.kubectl_plugin status chat"
    # A reader that has ended: `true` reads nothing, and the sleep lets it end first.
    script = f"set -o pipefail; (sleep 0.2; {program}) | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_kubectl_asks_and_complains_on_the_terminal(service: World, capfd: pytest.CaptureFixture[str]) -> None:
    """A login's prompt was swallowed with the error output, and the command hung."""
    del service
    assert main(["status", "other"]) == 1
    printed = capfd.readouterr()
    assert "NotFound" in printed.err
    assert printed.out == ""
