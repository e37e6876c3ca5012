"""Fixtures that several test folders share, which tests run at the same time, and how hypothesis and OpenMP run."""

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tests.cluster.fixtures", "tests.file_budgets"]

# Before a test folder's conftest.py imports torch or vLLM, which read these then.
# One thread for each engine, those of the servers that tests start included: two wait for each other, and next to a
# busy neighbour each wait is a turn of the scheduler's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
DEVICE = os.environ.get("OUTRIDER_TEST_DEVICE", "cpu")
if DEVICE not in ("cpu", "gpu"):
    raise pytest.UsageError(f"OUTRIDER_TEST_DEVICE is {DEVICE!r}; set it to cpu or gpu")
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

LONGEST_FIRST = (
    "cluster", "e2e", "test_profiler.py", "test_windowed_draft_model.py", "test_two_ranks.py", "test_block_drafts.py",
    "engine", "torch_engine", "control",
)  # fmt: skip
"""Folders and files; the tests of the operator share the cluster's process."""
FIRST_SERVED = ("cluster", "operator", "e2e", "test_profiler.py", "test_profiling.py")
"""Folders and files whose tests get the processor before others: a kubelet's probes are answered in time, and what is
measured is not the neighbour."""
GIVING_WAY = 10
"""Niceness of all other tests."""

# No test is timed: on a busy machine any example may take long. A commit passes or fails whenever it is tested: new
# examples are looked for on purpose, with `--hypothesis-profile=search`.
settings.register_profile("outrider", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("outrider")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of a cluster mostly wait, so that a process more than there are cores runs them next to those that compute.
    What a test starts has its priority. Only root may take back what it gave."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder, *_, file = item.path.relative_to(Path(__file__).parent).parts
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0 if {folder, file} & {*FIRST_SERVED} else GIVING_WAY)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first, so that no process is left alone with one."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    parts = item.path.parts
    turns = (place for place, part in enumerate(LONGEST_FIRST) if part in parts)
    return next(turns, len(LONGEST_FIRST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return SideBySide(config, log)


class SideBySide(LoadScopeScheduling):  # type: ignore[misc]  # xdist says nothing of its types
    """What one process runs in one go: the cluster's tests, which mostly wait; those of the engines that a file starts,
    which compute; a folder of unit tests. A process that is idle takes the next."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePosixPath(nodeid.split("::")[0])
        _, folder, *_ = file.parts
        if folder in ("cluster", "operator"):
            return "the session's cluster"
        if folder == "e2e":
            return "the end-to-end cluster"
        if file.match("engine/test_server_*"):
            return "the session's server"
        return str(file if folder == "engine" else file.parent)
