"""What drafters take of a device's memory crosses from the engine's worker to its core in a file of the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outrider_crds.state import DrafterMemory
from pydantic import TypeAdapter

FILE = "drafter-memory.json"
_Document = TypeAdapter(dict[str, DrafterMemory])


def write_drafter_memory(run_dir: str | Path, memory: Mapping[str, DrafterMemory]) -> None:
    Path(run_dir, FILE).write_bytes(_Document.dump_json(dict(memory)))


def read_drafter_memory(run_dir: str | Path) -> dict[str, DrafterMemory]:
    """Drafter -> what it takes; empty before the engine has its memory, and for those that have no model."""
    try:
        return _Document.validate_json(Path(run_dir, FILE).read_bytes())
    except FileNotFoundError:
        return {}
