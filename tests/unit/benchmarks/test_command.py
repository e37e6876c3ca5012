"""`make bench`, as the README and docs/benchmarks.md have it."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.benchmarks.evidence.prompts import REPOSITORY


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ([], ""),
        (["ONLY=3"], "--only 3"),
        (["FULL=1", "ONLY=4 controller_decision"], "--full --only 4 controller_decision"),
    ],
    ids=["everything", "one scenario", "the whole grid of two"],
)
def test_make_bench_passes_its_options_on(given: list[str], passed: str) -> None:
    """Bug: `make bench ONLY=3` ran everything."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    command = ["make", "-n", "bench", *given]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split()[1:] == ["-m", "tests.benchmarks", *passed.split()]
