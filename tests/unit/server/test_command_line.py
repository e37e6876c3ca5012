"""Messages for a user when `outrider-runtime serve` cannot start."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from outrider_runtime.server import config
from outrider_runtime.server import main as command
from outrider_runtime.server import serve as composition
from outrider_runtime.server.listeners import listen
from outrider_runtime.vllm_plugin.versions import check_engine_version

MANIFEST = """
apiVersion: outrider.dev/v1alpha1
kind: SpeculativeService
metadata: {name: chat}
spec:
  target:
    name: tiny
    source: {hostPath: {path: /nowhere/tiny}}
  accelerator: {products: [cpu]}
"""
HOT = {"schemaVersion": 1, "mode": "ClosedLoop", "draftPrefill": "Auto", "maxDraftTokens": 5}
BOOT = {
    "schemaVersion": 1,
    "service": "chat",
    "namespace": "demo",
    "revision": "r1",
    "target": {"name": "tiny", "source": {"hostPath": {"path": "/nowhere/tiny"}}},
    "accelerator": {"products": ["cpu"]},
    "engine": {},
    "maxDraftTokens": 5,
}


def _files(folder: Path, boot: object = BOOT, hot: object = HOT) -> list[str]:
    for name, document in (("boot.json", boot), ("hot.json", hot)):
        text = document if isinstance(document, str) else json.dumps(document)
        (folder / name).write_text(text)
    return ["serve", "--config", str(folder / "boot.json"), "--hot-config", str(folder / "hot.json")]


def _fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr; on free ports, so that only the case's own problem is there."""
    assert command.main([*arguments, "--port", "0", "--admin-port", "0"]) == 1
    lines = capsys.readouterr().err.strip()
    assert lines.startswith("outrider-runtime: ")
    assert "Traceback" not in lines
    return lines


@pytest.mark.parametrize(
    ("boot", "sentence"),
    [
        ("{nope", "boot.json is not valid: document: Invalid JSON"),
        ("\x00", "boot.json is not valid"),
        ({**BOOT, "engine": None}, "engine: Input should be"),
        ({**BOOT, "schemaVersion": 9}, "schemaVersion: is 9, and this release reads 1 to 1: upgrade the reading side"),
        ([], "boot.json is not valid"),
    ],
)
def test_invalid_boot_config_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], boot: object, sentence: str
) -> None:
    """One sentence with the file and the field, and exit status 1: no traceback."""
    assert sentence in _fails(_files(tmp_path, boot=boot), capsys)


def test_missing_or_binary_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unreadable is not the same as invalid."""
    arguments = _files(tmp_path)
    (tmp_path / "boot.json").write_bytes(b"\xff\xfe")
    assert "cannot read the boot config" in _fails(arguments, capsys)
    (tmp_path / "boot.json").unlink()
    assert "No such file" in _fails(arguments, capsys)


def test_invalid_hot_config_stops_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no config before it that could stay in force."""
    assert "hot.json is not valid: mode" in _fails(_files(tmp_path, hot={**HOT, "mode": "Sometimes"}), capsys)


def test_target_missing_from_its_volume_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 3: the model path does not exist."""
    message = _fails(_files(tmp_path), capsys)
    assert "the target 'tiny' is not there: /var/lib/outrider/models/target has no readable config.json" in message
    assert "spec.target.source" in message


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user, which needs root")
def test_unreadable_weights_are_named(tmp_path: Path) -> None:
    """safetensors writes mode 0600: a root user's conversion is closed to a non-root pod."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch(mode=0o600)
    boot = {**BOOT, "target": {"name": str(model), "source": {"hub": {}}}}
    arguments = [*_files(tmp_path, boot=boot), "--port", "0", "--admin-port", "0"]
    for folder in [tmp_path, *tmp_path.parents]:
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o755)
    status, stderr = _as_pods_user(arguments, tmp_path / "stderr")
    assert status == 1
    assert "no permission to read model.safetensors" in stderr
    assert "Traceback" not in stderr


def _as_pods_user(arguments: list[str], output: Path) -> tuple[int, str]:
    """Exit status and stderr as user 65532; forked, because the interpreter itself may be root's alone."""
    output.touch()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(output, os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w")
        os.setgroups([])
        os.setgid(65532)
        os.setuid(65532)
        os._exit(command.main(arguments))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.read_text()


def test_missing_target_is_reported_with_searched_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Searched: the path itself, the model root, and the folder of the manifest."""
    manifest = tmp_path / "chat.yaml"
    manifest.write_text(MANIFEST)
    message = _fails(["serve", "-f", str(manifest), "--model-root", str(tmp_path / "root")], capsys)
    for folder in ("/nowhere/tiny", f"{tmp_path}/root/tiny", f"{tmp_path}/models/tiny", "--model-root"):
        assert folder in message


def test_claim_is_refused_without_kubernetes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pvc source has no meaning on a laptop."""
    manifest = tmp_path / "chat.yaml"
    manifest.write_text(MANIFEST.replace("{hostPath: {path: /nowhere/tiny}}", "{pvc: {claimName: disk, path: tiny}}"))
    assert "the claim 'disk', and there are no claims without Kubernetes" in _fails(
        ["serve", "-f", str(manifest)], capsys
    )


def test_manifest_that_breaks_an_api_rule_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`serve -f` holds the same rules."""
    manifest = tmp_path / "chat.yaml"
    manifest.write_text(MANIFEST.replace("products: [cpu]", "products: [cpu, NVIDIA-H200]"))
    assert "is not a valid SpeculativeService" in _fails(["serve", "-f", str(manifest)], capsys)
    manifest.write_text("{")
    assert "is not YAML" in _fails(["serve", "-f", str(manifest)], capsys)
    assert "cannot read" in _fails(["serve", "-f", str(tmp_path / "other.yaml")], capsys)


def test_port_in_use_is_reported_before_the_model_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the message names the option that chooses another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = [*_files(tmp_path), "--host", "127.0.0.1"]
        assert command.main([*arguments, "--port", port, "--admin-port", "0"]) == 1
        assert f"port {port} of 127.0.0.1 is in use" in (message := capsys.readouterr().err)
        assert "--port" in message
        assert command.main([*arguments, "--port", "0", "--admin-port", port]) == 1
        assert "--admin-port" in capsys.readouterr().err
    assert command.main([*arguments, "--port", "70000", "--admin-port", "0"]) == 1
    assert "70000 is not a port" in capsys.readouterr().err


@pytest.mark.parametrize(("engine", "host"), [("", " of 127.0.0.1"), ("engine: {nodes: 2, tensorParallelSize: 2}", "")])
def test_ports_of_a_leader_are_open_to_its_workers(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    host: str,
) -> None:
    """`serve -f` over several nodes listened on the loopback alone: workers elsewhere never saw their leader."""
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "10.0.0.1")
    monkeypatch.setenv("LWS_WORKER_INDEX", "0")
    (tmp_path / "chat.yaml").write_text(f"{MANIFEST}  {engine}\n")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["serve", "-f", str(tmp_path / "chat.yaml"), "--model-root", str(tmp_path), "--port", str(port)]
        assert command.main(arguments) == 1
    assert f"port {port}{host} is in use" in capsys.readouterr().err


def test_ports_listen_on_every_address_in_a_pod() -> None:
    """Clusters are IPv4, IPv6 or both."""
    with listen("", 0, "--port") as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
        if listener.family == socket.AF_INET6:
            socket.create_connection(("::1", port), timeout=60).close()


def test_untested_vllm_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server refuses to start on a vLLM that was not tested, naming those that were."""

    def untested(*_: object) -> str:
        return check_engine_version("0.99.0")

    monkeypatch.setattr(composition, "plan_launch", untested)
    message = _fails(_files(tmp_path), capsys)
    assert "vLLM 0.99.0 is installed, but Outrider was tested with 0.32.* and 0.33.* only" in message


@pytest.mark.parametrize(
    "arguments", [[], ["serve", "--drain-grace", "soon"], ["serve", "-f", "x", "--config", "y"], ["sing"]]
)
def test_wrong_usage_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 is what users of command lines expect."""
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 2
    assert "usage: outrider-runtime" in capsys.readouterr().err


def test_run_folder_is_deleted_when_the_start_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder lies in memory; a crash loop must not fill it."""
    made: list[Path] = []
    run_folder = config.run_folder

    def recorded() -> Path:
        made.append(run_folder())
        return made[-1]

    monkeypatch.setattr(command, "run_folder", recorded)
    _fails(_files(tmp_path), capsys)
    assert len(made) == 1
    assert not made[0].exists()
