"""The entry point that vLLM calls in every process. What it raises would end vLLM."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
from outrider_runtime.stock_server import entry_point
from outrider_runtime.stock_server.entry_point import STRICT_VARIABLE, activate, is_enabled

TAKEOVER = "outrider_runtime.stock_server.takeover"


@pytest.fixture(autouse=True)
def process_of_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that makes vLLM's config, with OUTRIDER=1, in an empty folder."""
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", ModuleType("arg_utils"))
    monkeypatch.setenv("OUTRIDER", "1")
    monkeypatch.delenv("OUTRIDER_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


def installs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the calls of a takeover that does nothing."""
    calls: list[str] = []
    module = ModuleType(TAKEOVER)
    vars(module)["install"] = lambda: calls.append("install")
    monkeypatch.setitem(sys.modules, TAKEOVER, module)
    return calls


def test_missing_package_leaves_vllm_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: the import was outside the guard, so `vllm serve` ended where yaml or pydantic was missing."""
    monkeypatch.setitem(sys.modules, TAKEOVER, None)
    with caplog.at_level(logging.WARNING, logger=entry_point.logger.name):
        activate()
    (line,) = caplog.messages
    assert line.startswith("Outrider is not active, and vLLM serves with its own flags alone: it cannot be loaded")


def test_missing_package_is_an_error_for_strict_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, TAKEOVER, None)
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    with pytest.raises(SystemExit, match=f"{STRICT_VARIABLE} is set: it cannot be loaded"):
        activate()


@pytest.mark.parametrize(
    ("value", "enabled"), [("1", True), ("true", True), ("0", False), ("False", False), ("", False)]
)
def test_variable_switches_outrider(monkeypatch: pytest.MonkeyPatch, value: str, *, enabled: bool) -> None:
    calls = installs(monkeypatch)
    monkeypatch.setenv("OUTRIDER", value)
    activate()
    assert bool(calls) is enabled
    assert not is_enabled({})


def test_file_in_the_working_directory_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: without OUTRIDER_RUN_DIR, a launch.json of the user's switched Outrider off without a word."""
    calls = installs(monkeypatch)
    Path("launch.json").write_text("{}")
    activate()
    assert calls == ["install"]


def test_process_of_a_planned_engine_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = installs(monkeypatch)
    (tmp_path / "launch.json").write_text("{}")
    monkeypatch.setenv("OUTRIDER_RUN_DIR", str(tmp_path))
    activate()
    assert not calls
