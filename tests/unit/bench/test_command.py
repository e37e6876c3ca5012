"""`make bench`, as the README and docs/results.md have it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


def commanded(*arguments: str) -> list[str]:
    """The last command that `make` would run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    command = ["make", "-n", "bench", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], ["bench.replay"]),
        (["MINUTES=5"], ["bench.replay", "--minutes", "5"]),
        (["ONLY=real_cores"], ["bench.real_cores"]),
        (["ONLY=operator_services"], ["bench.operator_services"]),
    ],
    ids=["the bars", "what fits", "real cores", "another one"],
)
def test_make_bench_runs_the_chosen_benchmark(arguments: list[str], passed: list[str]) -> None:
    """Bug: `make bench ONLY=NAME` ran everything."""
    assert commanded(*arguments) == ["-m", *passed]
    assert importlib.util.find_spec(passed[0]) is not None
