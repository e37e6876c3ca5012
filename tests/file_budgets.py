"""A pytest plugin: `--file-budgets=TABLE` fails a run in which a test file takes longer than its budget.

Seconds are those of its tests with their fixtures, by the wall. The table gives them by file or folder; the longest
path that matches counts. Budgets hold for a machine half as fast as CI's: they find a file that grew, not a busy hour.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest

SHOWN_FILES = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--file-budgets", type=Path, metavar="TABLE", help="fail files that take longer than TABLE says")


def pytest_configure(config: pytest.Config) -> None:
    """Reports of all processes come together in the one that is no worker."""
    table = config.getoption("--file-budgets")
    if table is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FileBudgets(tomllib.loads(table.read_text())["seconds"]))


def budget_s(budgets: Mapping[str, float], file: str) -> float:
    """The budget of the file, or of the nearest folder around it that has one."""
    path = PurePosixPath(file)
    return next(budgets[str(place)] for place in (path, *path.parents) if str(place) in budgets)


class FileBudgets:
    """Seconds by file, compared with the budgets when the session ends."""

    def __init__(self, budgets: Mapping[str, float]) -> None:
        self._budgets = budgets
        self._taken_s: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._taken_s[report.nodeid.split("::")[0]] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._over() and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("slowest files and their budgets")
        by_seconds = sorted(self._taken_s.items(), key=lambda item: -item[1])
        for file, taken_s in by_seconds[:SHOWN_FILES]:
            terminalreporter.line(f"{taken_s:6.0f} s of {budget_s(self._budgets, file):4.0f} s  {file}")
        for file in self._over():
            terminalreporter.line(f"FAILED {file}: over its budget; make it faster, or say in the commit why it grew")

    def _over(self) -> list[str]:
        return [file for file, taken_s in self._taken_s.items() if taken_s > budget_s(self._budgets, file)]
