"""The one error of the simulator's inputs."""

from __future__ import annotations


class SimulationError(Exception):
    """The input cannot be simulated; the message says what was wrong, where, and what to do."""
