"""`make bench`, as the README and docs/benchmarks.md have it."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.benchmarks.__main__ import choice
from tests.benchmarks.evidence.prompts import REPOSITORY
from tests.benchmarks.evidence.scenario import FileError, Size, load_scenarios


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


@pytest.mark.parametrize(
    ("only", "size", "numbers", "alone"),
    [
        ([], Size.DEFAULT, [1, 2, 3, 4, 5, 6, 7], {"controller_decision", "skip_draft_at_k0"}),
        ([], Size.FULL, [1, 2, 3, 4, 5, 6, 7], {"controller_decision", "operator_services"}),
        (["3"], Size.DEFAULT, [3], set()),
        (["7", "operator_services"], Size.DEFAULT, [7], {"skip_draft_at_k0", "operator_services"}),
    ],
    ids=["the default", "the whole grid", "one scenario", "by name"],
)
def test_what_is_run(only: list[str], size: Size, numbers: list[int], alone: set[str]) -> None:
    picked, beside = choice(only, load_scenarios(size), size)
    assert [one.scenario for one in picked] == numbers
    assert alone <= set(beside)
    assert ("operator_services" in beside) == ("operator_services" in alone), "it takes eight minutes of its own"


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(FileError, match=r"--only nine: there are 1, 2, .*controller_decision"):
        choice(["nine"], load_scenarios(Size.DEFAULT), Size.DEFAULT)
