"""The tiny random target that heads are trained for, and answers of it that no training sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.training.tiny_target import prompts, tiny_target
from training.target import Answer, Target


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Training is a whole run, for each test that needs what it made."""
    for item in items:
        if item.path.parent == Path(__file__).parent and "trained" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tiny_target(tmp_path_factory.mktemp("target")), "cpu")


@pytest.fixture(scope="package")
def held_out(target: Target) -> list[Answer]:
    return target.write(prompts(5, 16), 24, 0.0)
