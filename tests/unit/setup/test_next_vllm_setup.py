"""`make deps` without vLLM's newest wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from setup import next_vllm
from setup.steps import SetupError


def test_wheel_that_cannot_be_had_skips_its_tests_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_arguments: object) -> None:
        raise SetupError("there is no network")

    monkeypatch.setattr(next_vllm, "FOLDER", tmp_path / "vllm")
    monkeypatch.setattr(next_vllm, "uv", lambda: "uv")
    monkeypatch.setattr(next_vllm, "run", run)
    next_vllm.try_overlay()
    assert "its tests are skipped: there is no network" in capsys.readouterr().err
    assert not next_vllm.FOLDER.exists()
