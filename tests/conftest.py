"""Fixtures that several test folders share, which tests run beside each other, and how hypothesis and OpenMP run."""

import os
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tests.cluster.fixtures"]

LONGEST_FIRST = (
    "cluster", "e2e", "test_speculation_is_lossless.py", "test_several_neural_drafters.py", "test_profiler.py",
    "test_sparse_self.py", "test_a_draft_model_over_a_window.py", "test_what_serving_must_not_lose.py", "torch_engine",
    "test_a_bug_in_the_books.py", "control",
)  # fmt: skip
"""Folders and files; the tests of the operator share the cluster's process."""

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
    """The longest come first, so that no process is left alone with one."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    parts = item.path.parts
    return next((turn for turn, part in enumerate(LONGEST_FIRST) if part in parts), len(LONGEST_FIRST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return Beside(config, log)


class Beside(LoadScopeScheduling):  # type: ignore[misc]  # xdist says nothing of its types
    """What one process runs in one go: the tests of the session's cluster, which mostly wait; those on a cluster of
    their own; those of the engines that a file starts, which compute; a folder of unit tests. A process that is idle
    takes the next."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePosixPath(nodeid.split("::")[0])
        _, folder, *_ = file.parts
        if folder in ("cluster", "operator"):
            return "the session's cluster"
        if folder == "e2e":
            return "the end-to-end tests' cluster"
        if file.match("engine/test_server_*"):
            return "the session's server"
        return str(file if folder == "engine" else file.parent)
