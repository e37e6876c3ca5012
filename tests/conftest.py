"""Fixtures that several test folders share, which tests run beside each other, and how hypothesis and OpenMP run."""

import os

import pytest
from hypothesis import settings

pytest_plugins = ["tests.cluster.fixtures"]

# No test is timed: on a busy machine any example may take long.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")


def pytest_configure() -> None:
    """One thread for each engine, those of the servers that tests start included: two wait for each other, and beside
    a busy neighbour each wait is a turn of the scheduler's. OpenMP reads this when torch is loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In two processes (make test) one holds the clusters, which mostly wait, the other the engines, which compute.
    The end-to-end tests come last: they do both, and want the machine to themselves."""
    items.sort(key=lambda item: "e2e" in item.path.parts)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    return next((marker for marker in ("cluster", "model") if item.get_closest_marker(marker)), "neither")
