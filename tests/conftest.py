"""Fixtures that several test folders share, which tests run beside each other, and how hypothesis and OpenMP run."""

import os
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tests.cluster.fixtures"]

# No test is timed: on a busy machine any example may take long.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")


def pytest_configure() -> None:
    """One thread for each engine, those of the servers that tests start included: two wait for each other, and beside
    a busy neighbour each wait is a turn of the scheduler's. OpenMP reads this when torch is loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Triton looks when it is imported, which any test that imports vLLM does.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The end-to-end tests come last: by then nothing runs beside them."""
    items.sort(key=lambda item: "e2e" in item.path.parts)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return TwoProcesses(config, log)


class TwoProcesses(LoadScopeScheduling):  # type: ignore[misc]  # xdist says nothing of its types
    """`make test`: one process holds the clusters, which mostly wait, the other the engines, which compute."""

    def _split_scope(self, nodeid: str) -> str:
        folder = nodeid.split("/")[1]
        return "clusters" if folder in ("cluster", "operator", "e2e") else folder
