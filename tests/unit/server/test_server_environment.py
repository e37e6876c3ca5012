"""A pod's user has no name and its root file system is read-only."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from outrider_runtime.server import server_environment as module
from outrider_runtime.server.config import run_folder
from outrider_runtime.server.server_environment import server_environment
from outrider_runtime.server.server_errors import StartupError


def test_unwritable_home_is_replaced(tmp_path: Path) -> None:
    """Libraries write caches beneath HOME while the engine loads."""
    added = server_environment({"HOME": "/nonexistent"}, tmp_path)
    assert added["HOME"] == str(tmp_path / "home")
    assert Path(added["HOME"]).is_dir()
    assert "HOME" in server_environment({}, tmp_path)


def test_variables_of_the_user_are_kept(tmp_path: Path) -> None:
    """`engine.env` and the pod's own environment win over defaults."""
    mine = {
        "HOME": str(tmp_path), "USER": "me", "VLLM_MAX_N_SEQUENCES": "2", "HF_HOME": "/somewhere",
        "PYTHONWARNINGS": "error", "NUMBA_CPU_NAME": "native",
    }  # fmt: skip
    assert server_environment(mine, tmp_path) == {}


def test_compiled_code_is_kept_on_the_model_cache_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a restarted pod compiles nothing. The image is read-only, so compiled code goes to the volume."""
    monkeypatch.setattr(module, "MODEL_CACHE_DIR", str(tmp_path))
    assert server_environment({}, tmp_path)["NUMBA_CACHE_DIR"] == str(tmp_path / "numba")
    assert "NUMBA_CACHE_DIR" not in server_environment({"NUMBA_CACHE_DIR": "/mine"}, tmp_path)


def test_engine_uses_the_compiled_code_of_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: numba reads its CPU once. If vLLM compiled a function of its own first, all others were compiled again."""
    monkeypatch.setattr(module, "portable_cpu_variables", lambda environ: {"NUMBA_CPU_NAME": "any", **environ})
    assert server_environment({}, tmp_path)["NUMBA_CPU_NAME"] == "any"
    assert "NUMBA_CPU_NAME" not in server_environment({"NUMBA_CPU_NAME": "mine"}, tmp_path)


def test_user_without_a_name_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for the user's name to place its cache, and fails where there is none."""
    free = next(uid for uid in range(60_000, 65_000) if uid not in {entry.pw_uid for entry in pwd.getpwall()})
    monkeypatch.setattr(os, "getuid", lambda: free)
    assert server_environment({}, tmp_path)["USER"] == "outrider"


def test_resource_tracker_prints_nothing_after_the_last_line(tmp_path: Path) -> None:
    """Bug: a pod's termination message was Python's tracker on what an engine that had failed left behind."""
    leak = "from multiprocessing.resource_tracker import register as r; r('/nothing-of-that-name', 'semaphore')"
    said = [
        subprocess.run([sys.executable, "-c", leak], env=environ, capture_output=True, text=True, check=True).stderr
        for environ in ({}, server_environment({}, tmp_path))
    ]
    assert "resource_tracker" in said[0]
    assert "There appear to be" not in said[1]


def test_downloads_go_to_the_model_cache_if_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """spec.modelCache is a volume at a fixed place."""
    assert "HF_HOME" not in server_environment({}, tmp_path)
    monkeypatch.setattr(module, "MODEL_CACHE_DIR", str(tmp_path))
    assert server_environment({}, tmp_path)["HF_HOME"] == str(tmp_path)


def test_run_folders_of_a_crashed_container_are_deleted(tmp_path: Path) -> None:
    """The run volume outlives a container: its last snapshot would make a loading pod look ready."""
    crashed = run_folder({"OUTRIDER_RUN_DIR": str(tmp_path)})
    (crashed / "state.json").write_text("{}")
    fresh = run_folder({"OUTRIDER_RUN_DIR": str(tmp_path)})
    assert fresh.parent == tmp_path
    assert list(tmp_path.iterdir()) == [fresh]
    assert not (fresh / "state.json").exists()


def test_run_folders_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    """Bug: in vLLM's own server, SIGKILL left a folder in memory for good."""
    environ = {"OUTRIDER_RUN_DIR": str(tmp_path)}
    running = run_folder(environ, keep_others=True)
    kill = "import os, signal; from outrider_runtime.server.config import run_folder; run_folder(keep_others=True)"
    command = [sys.executable, "-c", f"{kill}; os.kill(os.getpid(), signal.SIGKILL)"]
    subprocess.run(command, env={**os.environ, **environ}, check=False)
    (tmp_path / "outrider-of-another-program").mkdir()
    assert len(list(tmp_path.iterdir())) == 3
    fresh = run_folder(environ, keep_others=True)
    assert {folder.name for folder in tmp_path.iterdir()} == {running.name, fresh.name, "outrider-of-another-program"}


def test_run_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """The remedy stands in the sentence."""
    with pytest.raises(StartupError, match="set OUTRIDER_RUN_DIR to a writable folder"):
        run_folder({"OUTRIDER_RUN_DIR": str(tmp_path / "missing")})
