"""A pytest plugin: `--features=PAGE` writes the table of what the run has seen right.

tests/features.toml says which tests show a feature. One whose tests did not all run keeps its row, with "not run".
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("features.toml")
FOLDER = "tests/engine/"
HEAD = """# What was seen right

Made by `make test`: each row is the outcome of tests in `tests/engine`, with real engines on CPUs. Answers were
compared with those without speculation. "Llama" and "Qwen3-Next" are small models with planted weights.

| feature | target | drafters | seen |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Feature:
    """tests: names in tests/engine, of a file (`test_a.py`) or a function of it (`test_a.py::test_b`)."""

    name: str
    target: str
    drafters: str
    tests: Sequence[str]


def read_features() -> list[Feature]:
    """Return the rows of tests/features.toml, in their order."""
    return [Feature(**row) for row in tomllib.loads(TABLE.read_text())["feature"]]


def features_page(features: Sequence[Feature], outcomes: Mapping[str, set[str]]) -> str:
    """Return the page. outcomes: test file, or test function -> outcomes of its runs."""
    rows = (f"| {it.name} | {it.target} | {it.drafters} | {_verdict(it, outcomes)} |\n" for it in features)
    return HEAD + "".join(rows)


def _verdict(feature: Feature, outcomes: Mapping[str, set[str]]) -> str:
    by_test = [outcomes.get(test, set()) for test in feature.tests]
    if any("failed" in of_test for of_test in by_test):
        return "**failed**"
    return "yes" if all("passed" in of_test for of_test in by_test) else "not run"


class FeaturesPage:
    """Collects the outcomes of all processes, and writes the page when the session ends."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._outcomes: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid.startswith(FOLDER) and (report.when == "call" or report.outcome != "passed"):
            test = report.nodeid.removeprefix(FOLDER).split("[")[0]
            for name in (test, test.split("::")[0]):
                self._outcomes[name].add(report.outcome)

    def pytest_sessionfinish(self) -> None:
        self._page.parent.mkdir(parents=True, exist_ok=True)
        self._page.write_text(features_page(read_features(), self._outcomes))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--features", type=Path, metavar="PAGE", help="write what was seen right into PAGE")


def pytest_configure(config: pytest.Config) -> None:
    """Reports of all processes come together in the one that is no worker."""
    page = config.getoption("--features")
    if page is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FeaturesPage(page))
