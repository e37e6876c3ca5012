"""The trainings of docs/how-to/train-a-draft.md, in order, on a tiny target: each command is taken and makes a head."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.documented_commands import Command, Runner, commands_of
from training.target import Target

pytestmark = pytest.mark.slow

SIZES = ("--batch=32", "--length=16", "--draft-vocabulary=64", "--device=cpu", "--steps=1")
"""Options for a target of 200 tokens."""
PROMPTS = [f"w{number} w{number + 9} w3" for number in range(5, 25)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder: it has the prompts, and gets the heads."""
    home = tmp_path_factory.mktemp("home")
    (home / "mine.txt").write_text("\n".join(PROMPTS))
    return home


@pytest.mark.parametrize("command", commands_of(Runner.TRAINERS), ids=str)
def test_documented_training_makes_a_head(
    command: Command, target: Target, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    monkeypatch.setattr("training.budget.VOCABULARY_TOKENS", 500)  # tokens that are read before the first step
    _python, _m, program, *arguments = command.words
    arguments = [_places(home, target).get(word, word) for word in arguments]
    assert importlib.import_module(f"{program}.__main__").main([*arguments, *SIZES]) == 0
    if "--output" in arguments:
        head = Path(arguments[arguments.index("--output") + 1])
        assert (head / "model.safetensors").exists()


def _places(home: Path, target: Target) -> dict[str, str]:
    """The reader's folder -> where it is here. The other head is the one that the page's first command made."""
    names = ("my-llama-eagle3", "my-llama-medusa", "my-llama-block")
    heads = {f"~/{name}": str(home / name) for name in names}
    return {**heads, "~/my-llama": _folder_of(target), "~/another-head": str(home / names[0])}


def _folder_of(target: Target) -> str:
    return str(target.model.config._name_or_path)
