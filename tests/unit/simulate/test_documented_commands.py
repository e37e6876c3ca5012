"""The commands of docs/how-to/simulate.md, as its reader types them: with fewer requests, and into another folder."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
from outrider_runtime.simulate.main import main

from setup.steps import REPOSITORY
from tests.documented_commands import Command, Runner, commands_of
from tests.unit.simulate.test_command_line import MEASURED_HEAD, MEASURED_TARGET

COMMANDS = commands_of(Runner.SIMULATOR)


def _words(command: Command) -> list[str]:
    return [os.path.expandvars(word) for word in command.words]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("command", [c for c in COMMANDS if "outrider-simulate" in c.text], ids=str)
@pytest.mark.slow
def test_documented_simulation_writes_its_figures(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    arguments = [str(tmp_path / "out") if word == "out" else word for word in _words(command)[1:]]
    main([*arguments, "--duration", "1s"])
    assert "outrider" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "simulation.json").read_text())["figures"]


@pytest.mark.parametrize("command", [c for c in COMMANDS if "python -m" in c.text], ids=str)
def test_documented_program_writes_a_world(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The programs that need no extra; `result.json` is one that was measured."""
    monkeypatch.setenv("WORLDS", str(tmp_path / "worlds"))
    (tmp_path / "worlds").mkdir()
    (tmp_path / "result.json").write_text(json.dumps({"target": MEASURED_TARGET, "drafters": [MEASURED_HEAD]}))
    _python, _m, module, *arguments = _words(command)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    importlib.import_module(module).main()
    assert len(list((tmp_path / "worlds").iterdir())) == 1
