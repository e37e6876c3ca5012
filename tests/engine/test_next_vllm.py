"""The newest supported vLLM answers alike, too. `make test-vllm-next` runs half of this folder on it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from setup import next_vllm
from setup.steps import REPOSITORY

pytestmark = [pytest.mark.model, pytest.mark.slow]
LOSSLESS = "tests/engine/test_lossless_speculation.py::test_{}[EAGLE-3 and prompt lookup]"
TESTS = (
    "tests/engine/test_vllm_internals.py",
    "tests/engine/test_patches.py",
    "tests/engine/test_takeover.py",
    LOSSLESS.format("each_drafter_at_each_length"),
    LOSSLESS.format("changing_lengths_and_drafters_keep_answers"),
    LOSSLESS.format("the_closed_loop_by_itself"),
)


def test_newest_supported_vllm_passes_these_tests() -> None:
    if not next_vllm.FOLDER.exists():
        pytest.skip(f"vLLM {next_vllm.VERSION} is not here: `make deps` could not download its wheel")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        capture_output=True, text=True, check=False, cwd=REPOSITORY,
        env=next_vllm.environment(next_vllm.FOLDER, os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
