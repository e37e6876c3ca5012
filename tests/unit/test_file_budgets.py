"""`make test` fails a file that takes longer than its budget, and shows where the time goes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.file_budgets import budget_s

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "expected_s"), [("tests/a/test_b.py", 5), ("tests/a/test_c.py", 2), ("tests/test_d.py", 1)]
)
def test_budget_of_a_file_is_that_of_the_longest_path(file: str, expected_s: float) -> None:
    assert budget_s({"tests": 1, "tests/a": 2, "tests/a/test_b.py": 5}, file) == expected_s


@pytest.mark.slow
@pytest.mark.parametrize("processes", [[], ["-n", "1"]], ids=["one process", "xdist"])
@pytest.mark.parametrize(("budget", "code"), [(60, 0), (0.0, 1)], ids=["within", "over"])
def test_run_fails_only_when_a_file_is_over_its_budget(
    tmp_path: Path, processes: list[str], budget: float, code: int
) -> None:
    """Bug avoided: with xdist the reports come from other processes, and the exit status is the first one's."""
    (tmp_path / "test_sleep.py").write_text("import time\n\n\ndef test_sleep():\n    time.sleep(0.01)\n")
    table = tmp_path / "budgets.toml"
    table.write_text(f'[seconds]\n"." = {budget}\n')
    command = [sys.executable, "-m", "pytest", "-p", "tests.file_budgets", f"--file-budgets={table}", *processes]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert ("over its budget" in done.stdout) == bool(code)
    assert "1 passed" in done.stdout
