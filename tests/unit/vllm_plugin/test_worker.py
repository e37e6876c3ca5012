"""What a worker does on every device."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_runtime.vllm_plugin.cause import cause
from outrider_runtime.vllm_plugin.worker import PoolWorker


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

    class Worker(PoolWorker, Broken):
        pass

    monkeypatch.setenv("OUTRIDER_RUN_DIR", str(tmp_path))
    with pytest.raises(OSError, match="no such"):
        getattr(Worker(), call)(**({} if call == "init_device" else {"load_dummy_weights": True}))
    assert cause(tmp_path) == f"OSError: no such {'device' if call == 'init_device' else 'weights, True'}"
