"""Fixtures that several test folders share, which tests run at the same time, and how hypothesis and OpenMP run."""

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tests.cluster.fixtures", "tests.features", "tests.file_budgets"]

# Before a test folder's conftest.py imports torch or vLLM, which read these then.
# One thread for each engine, those of the servers that tests start included: two wait for each other, and next to a
# busy neighbour each wait is a turn of the scheduler's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
DEVICE = os.environ.get("OUTRIDER_TEST_DEVICE", "cpu")
if DEVICE not in ("cpu", "gpu"):
    raise pytest.UsageError(f"OUTRIDER_TEST_DEVICE is {DEVICE!r}; set it to cpu or gpu")
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

TOGETHER = {
    "tests/operator/api": "clusters without an operator",
    "tests/operator/chart": "clusters without an operator",
    "tests/cluster": "clusters without an operator",
    "tests/operator": "the operator's cluster",
    "tests/e2e": "the end-to-end cluster",
    "tests/engine/test_server_": "servers",
    "tests/engine/test_two_nodes": "servers",
    "tests/engine/test_stock_server": "servers",
    "tests/engine/test_next_vllm": "servers",
    "tests/engine/test_takeover": "servers",
}
"""What one process runs in one go because it shares a cluster or a server, or because two of its kind would not fit the
memory (each server is three processes, of 1 to 2 GiB each), by the beginning of the file's path."""
LONGEST_FIRST = (
    "tests/operator/api",
    "tests/operator/chart",
    "tests/cluster",
    "tests/operator",
    "tests/e2e",
    "tests/engine/test_profiler.py",
    "tests/engine/test_two_nodes.py",
    "tests/engine/test_windowed_draft_model.py",
    "tests/engine/test_two_ranks.py",
    "tests/engine/test_block_drafts.py",
    "tests/engine",
    "tests/unit/torch_engine",
    "tests/unit/control",
)
"""Beginnings of paths. Tests of the API write a status themselves: where there is one process, they run before an
operator starts. Two nodes' servers end before the session's server starts."""
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
    """Rank the longest tests first, so that no process runs one while the others have none left."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    turns = (place for place, beginning in enumerate(LONGEST_FIRST) if item.nodeid.startswith(beginning))
    return next(turns, len(LONGEST_FIRST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return SideBySide(config, log)


class SideBySide(LoadScopeScheduling):  # type: ignore[misc]  # xdist says nothing of its types
    """One process runs TOGETHER's tests of one name, which mostly wait; those of the engines that a file starts, which
    compute; or a folder of unit tests. A process that is idle takes the next."""

    def _split_scope(self, nodeid: str) -> str:
        shared = (name for beginning, name in TOGETHER.items() if nodeid.startswith(beginning))
        file = PurePosixPath(nodeid.split("::")[0])
        return next(shared, str(file if nodeid.startswith("tests/engine/") else file.parent))
