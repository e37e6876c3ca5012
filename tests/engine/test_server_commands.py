"""docs/tutorials/laptop.md: its requests, word by word, to a server started as it says; only the ports are others."""

from __future__ import annotations

import subprocess

import pytest

from tests.documented_commands import Command, Runner, commands_of
from tests.engine.conftest import Laptop

pytestmark = [pytest.mark.model]

SHOWN = {
    "v1/chat/completions": '"choices"',
    "outrider/why": "k = ",
    "metrics": "outrider_draft_length",
}
"""Part of an address -> what its answer holds."""


@pytest.mark.parametrize("command", commands_of(Runner.SERVER), ids=str)
def test_laptop_tutorial_command_shows_what_it_promises(laptop: Laptop, command: Command) -> None:
    text = command.text.replace("localhost:8000", f"127.0.0.1:{laptop.server.port}")
    text = text.replace("localhost:9000", f"127.0.0.1:{laptop.server.admin_port}")
    assert text != command.text, "a request to neither port"
    shown = next(words for address, words in SHOWN.items() if address in text)
    laptop.server.wait_until(shown, lambda: shown in output_of(text))  # what was decided is written a moment later


def output_of(command: str) -> str:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.replace("curl ", "curl -S --fail-with-body ")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
