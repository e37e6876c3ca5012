"""What an engine's worker tells its core once, before it serves: files of the run folder, for the pod's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from outrider_crds.state import DrafterMemory, Verification
from pydantic import TypeAdapter

MEMORY_FILE = "drafter-memory.json"
VERIFICATION_FILE = "verification"
RANKING_FILE = "device-ranks"
LAYERS_FILE = "drafter-layers.json"
FILES = (MEMORY_FILE, VERIFICATION_FILE, RANKING_FILE, LAYERS_FILE)
_Layers = TypeAdapter(dict[str, list[str]])
_Memory = TypeAdapter(dict[str, DrafterMemory])


def write_drafter_memory(run_dir: str | Path, memory: Mapping[str, DrafterMemory]) -> None:
    Path(run_dir, MEMORY_FILE).write_bytes(_Memory.dump_json(dict(memory)))


def read_drafter_memory(run_dir: str | Path) -> dict[str, DrafterMemory]:
    """Drafter -> what it takes; empty before the engine has its memory, and for those that have no model."""
    try:
        return _Memory.validate_json(Path(run_dir, MEMORY_FILE).read_bytes())
    except FileNotFoundError:
        return {}


def write_drafter_layers(run_dir: str | Path, layers: Mapping[str, Iterable[str]]) -> None:
    """layers: drafter -> names of its attention layers."""
    named = {drafter: sorted(names) for drafter, names in layers.items()}
    Path(run_dir, LAYERS_FILE).write_bytes(_Layers.dump_json(named))


def read_drafter_layers(run_dir: str | Path) -> dict[str, list[str]]:
    """Drafter -> names of its attention layers; empty before the engine has its memory."""
    try:
        return _Layers.validate_json(Path(run_dir, LAYERS_FILE).read_bytes())
    except FileNotFoundError:
        return {}


def write_verification(run_dir: str | Path, verification: Verification) -> None:
    Path(run_dir, VERIFICATION_FILE).write_text(verification.value, encoding="utf-8")


def read_verification(run_dir: str | Path) -> Verification | None:
    """None before the engine has its graphs."""
    try:
        return Verification(Path(run_dir, VERIFICATION_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def write_device_ranks(run_dir: str | Path, *, device_ranks: bool) -> None:
    """device_ranks: whether the worker's device chooses the proposals that are verified."""
    Path(run_dir, RANKING_FILE).write_text("yes" if device_ranks else "no", encoding="utf-8")


def read_device_ranks(run_dir: str | Path) -> bool:
    """False before the engine has its graphs."""
    try:
        return Path(run_dir, RANKING_FILE).read_text(encoding="utf-8") == "yes"
    except FileNotFoundError:
        return False
