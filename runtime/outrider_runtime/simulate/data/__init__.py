"""Worlds, recordings, and the raw numbers that worlds are made of."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def data_text(name: str) -> str:
    """A shipped file."""
    return (FOLDER / name).read_text(encoding="utf-8")
