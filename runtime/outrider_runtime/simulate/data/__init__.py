"""Worlds, recordings, and the raw numbers that worlds are made of."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
