"""Fixtures that several test folders share, and how hypothesis runs."""

from hypothesis import settings

pytest_plugins = ["tests.cluster.fixtures"]

# No test is timed: on a busy machine any example may take long.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")
