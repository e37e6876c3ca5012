"""Fixtures of the simulator's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def repository() -> Path:
    return Path(__file__).parents[3]
