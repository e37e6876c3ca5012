"""Fixtures that several test folders share, and how hypothesis and OpenMP run."""

import os

from hypothesis import settings

pytest_plugins = ["tests.cluster.fixtures"]

# No test is timed: on a busy machine any example may take long.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")


def pytest_configure() -> None:
    """One thread for each engine, those of the servers that tests start included: two wait for each other, and beside
    a busy neighbour each wait is a turn of the scheduler's. OpenMP reads this when torch is loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
