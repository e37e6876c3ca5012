"""Facts that an engine's worker reports to the engine core once, before it serves: files in the run folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from outrider_crds.runtime_state import DrafterMemory, Verification
from pydantic import TypeAdapter

MEMORY_FILE = "drafter-memory.json"
VERIFICATION_FILE = "verification"
RANKING_FILE = "device-ranks"
LAYERS_FILE = "drafter-layers.json"
FILES = (MEMORY_FILE, VERIFICATION_FILE, RANKING_FILE, LAYERS_FILE)
_Layers = TypeAdapter(dict[str, list[str]])
_Memory = TypeAdapter(dict[str, DrafterMemory])


def write_drafter_memory(run_dir: str | Path, memory: Mapping[str, DrafterMemory]) -> None:
    """Write the memory of each drafter, by name."""
    Path(run_dir, MEMORY_FILE).write_bytes(_Memory.dump_json(dict(memory)))


def read_drafter_memory(run_dir: str | Path) -> dict[str, DrafterMemory]:
    """Return the memory of each drafter with a model, by name; empty before the engine has allocated its memory."""
    try:
        return _Memory.validate_json(Path(run_dir, MEMORY_FILE).read_bytes())
    except FileNotFoundError:
        return {}


def write_drafter_layers(run_dir: str | Path, layers: Mapping[str, Iterable[str]]) -> None:
    """Write the names of each drafter's attention layers, by drafter name."""
    sorted_layers = {drafter: sorted(names) for drafter, names in layers.items()}
    Path(run_dir, LAYERS_FILE).write_bytes(_Layers.dump_json(sorted_layers))


def read_drafter_layers(run_dir: str | Path) -> dict[str, list[str]]:
    """Return the names of each drafter's attention layers; empty before the engine has allocated its memory."""
    try:
        return _Layers.validate_json(Path(run_dir, LAYERS_FILE).read_bytes())
    except FileNotFoundError:
        return {}


def write_verification(run_dir: str | Path, verification: Verification) -> None:
    Path(run_dir, VERIFICATION_FILE).write_text(verification.value, encoding="utf-8")


def read_verification(run_dir: str | Path) -> Verification | None:
    """Return how the worker verifies; None before the engine has captured its graphs."""
    try:
        return Verification(Path(run_dir, VERIFICATION_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def write_device_ranks(run_dir: str | Path, *, device_ranks: bool) -> None:
    """Write whether the worker's device, not the engine core, chooses the proposals that are verified."""
    Path(run_dir, RANKING_FILE).write_text("yes" if device_ranks else "no", encoding="utf-8")


def read_device_ranks(run_dir: str | Path) -> bool:
    """Return whether the device chooses the proposals; False before the engine has captured its graphs."""
    try:
        return Path(run_dir, RANKING_FILE).read_text(encoding="utf-8") == "yes"
    except FileNotFoundError:
        return False
