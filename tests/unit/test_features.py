"""The table of what was seen right names tests that exist; one that failed or did not run is not counted as seen."""

import ast
from pathlib import Path

import pytest

from tests.features import Feature, FeaturesPage, features_page, read_features

ENGINE_TESTS = Path(__file__).parents[1] / "engine"
FEATURE = Feature("LoRA", "Llama", "Eagle", ("test_a.py::test_one", "test_a.py::test_two"))


@pytest.mark.parametrize("name", [test for feature in read_features() for test in feature.tests])
def test_each_feature_names_a_test(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ENGINE_TESTS / file).read_text())
    assert not function or function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ({"passed"}, "yes"),
        ({"passed", "failed"}, "**failed**"),
        ({"skipped"}, "not run"),
        (set(), "not run"),
    ],
)
def test_feature_is_seen_if_all_its_tests_passed(outcomes: set[str], verdict: str) -> None:
    seen = {"test_a.py::test_one": {"passed"}, "test_a.py::test_two": outcomes}
    assert features_page([FEATURE], seen).endswith(f"| LoRA | Llama | Eagle | {verdict} |\n")


def test_outcomes_of_a_file_and_its_cases_are_collected(tmp_path: Path) -> None:
    page = FeaturesPage(tmp_path / "new" / "page.md")
    for name in ("test_two_ranks.py::test_x[case 1]", "test_two_nodes.py::test_y"):
        where = (name, 0, name)
        outcome = "passed" if "ranks" in name else "failed"
        page.pytest_runtest_logreport(
            pytest.TestReport(f"tests/engine/{name}", where, {}, outcome, None, "call")  # type: ignore[arg-type]
        )
    page.pytest_sessionfinish()
    rows = {
        line.split("|")[1].strip(): line
        for line in (tmp_path / "new" / "page.md").read_text().splitlines()
        if "|" in line
    }
    assert rows["Tensor parallelism over two ranks"].endswith("| yes |")
    assert rows["A target over two nodes"].endswith("| **failed** |")
