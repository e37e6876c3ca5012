"""Passes the state from vLLM's engine core process to the API server's process: a JSON file, replaced atomically.

The engine core writes a `RuntimeState` about every 0.25 s into the run folder (in memory). The server reads it and adds
what only the server knows (`ready`, `reported_at`).
"""

from __future__ import annotations

from pathlib import Path

from outrider_crds.runtime_config import BootConfig, HotConfig, config_hash
from outrider_crds.runtime_state import RuntimeState

from outrider_runtime.whole_file import write_whole

SNAPSHOT_FILE = "state.json"
DECISIONS_FILE = "why.txt"
WRITE_EVERY_S = 0.25  # as often as the server's process reads it (`server.watch`)


def write_snapshot(run_dir: str | Path, state: RuntimeState) -> None:
    """Replace the snapshot atomically: a reader sees the old one or the new one."""
    write_whole(Path(run_dir, SNAPSHOT_FILE), state.model_dump_json(by_alias=True, exclude_none=True).encode())


def write_decisions(run_dir: str | Path, text: str) -> None:
    """Replace the text of the last decisions, which the page `/outrider/why` shows."""
    write_whole(Path(run_dir, DECISIONS_FILE), text.encode())


def read_decisions(run_dir: str | Path) -> str:
    """Return the text of the last decisions; empty before the engine core's first."""
    try:
        return Path(run_dir, DECISIONS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def read_snapshot(run_dir: str | Path) -> RuntimeState | None:
    """Return the engine core's last state; None before its first."""
    try:
        text = Path(run_dir, SNAPSHOT_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return RuntimeState.model_validate_json(text)


def blank_state(boot: BootConfig, hot: HotConfig, *, started_at: float) -> RuntimeState:
    """Return the state of a pod whose engine has not reported yet."""
    return RuntimeState(
        service=boot.service,
        namespace=boot.namespace,
        revision=boot.revision,
        config_hash=config_hash(hot),
        started_at=started_at,
        reported_at=started_at,
        ready=False,
        plugin_active=False,
    )
