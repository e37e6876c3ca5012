"""The reason of an engine's end, noted by the process that knows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_runtime.vllm_plugin.cause import cause, note_cause


def test_the_first_to_tell_is_believed(tmp_path: Path) -> None:
    """A worker knows what was wrong, the engine core that a worker failed, and the server that the core is gone."""
    environ = {"OUTRIDER_RUN_DIR": str(tmp_path)}
    assert cause(tmp_path) == ""
    for error in (ValueError("no common\n block size"), RuntimeError("a worker failed")):
        with pytest.raises(type(error)), note_cause(environ):
            raise error
    assert cause(tmp_path) == "ValueError: no common block size"


def test_a_signal_is_no_cause(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), note_cause({"OUTRIDER_RUN_DIR": str(tmp_path)}):
        raise SystemExit
    assert cause(tmp_path) == ""
