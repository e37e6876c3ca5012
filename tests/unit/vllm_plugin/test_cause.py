"""Why an engine ended, told by the process that knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_runtime.vllm_plugin.cause import TellingWorker, cause, told


def test_the_first_to_tell_is_believed(tmp_path: Path) -> None:
    """A worker knows what was wrong, the engine core that a worker failed, and the server that the core is gone."""
    environ = {"OUTRIDER_RUN_DIR": str(tmp_path)}
    assert cause(tmp_path) == ""
    for error in (ValueError("no common\n block size"), RuntimeError("a worker failed")):
        with pytest.raises(type(error)), told(environ):
            raise error
    assert cause(tmp_path) == "ValueError: no common block size"


def test_a_signal_is_no_cause(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), told({"OUTRIDER_RUN_DIR": str(tmp_path)}):
        raise SystemExit
    assert cause(tmp_path) == ""


@pytest.mark.parametrize("call", ["init_device", "load_model"])
def test_a_worker_tells_what_ends_it_before_it_takes_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """vLLM says only that a background process failed."""

    class Broken:
        def init_device(self) -> None:
            raise OSError("no such device")

        def load_model(self, *, load_dummy_weights: bool) -> None:
            raise OSError(f"no such weights, {load_dummy_weights}")

    class Worker(TellingWorker, Broken):
        pass

    monkeypatch.setenv("OUTRIDER_RUN_DIR", str(tmp_path))
    with pytest.raises(OSError, match="no such"):
        getattr(Worker(), call)(**({} if call == "init_device" else {"load_dummy_weights": True}))
    assert cause(tmp_path) == f"OSError: no such {'device' if call == 'init_device' else 'weights, True'}"
