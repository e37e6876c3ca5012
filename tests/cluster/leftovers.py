"""What a cluster that was killed may leave, empty cgroups and its state folder, and their removal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

from tests.cluster.layout import Layout

_PREFIX = "outrider-"
_CGROUPS = Path("/sys/fs/cgroup")


def cgroup_of(pid: int) -> str:
    """The parent of a cluster's containers, named after its first process."""
    return f"{_PREFIX}{pid}"


def cgroup_folders() -> list[Path]:
    """Every such cgroup of this machine: one for each controller (v1) or one in all (v2)."""
    return [*_CGROUPS.glob(f"{_PREFIX}*"), *_CGROUPS.glob(f"*/{_PREFIX}*")]


def remove_dead_cgroups(patience_s: float = 0.0) -> None:
    """Remove those whose cluster is gone; its last processes may take a moment to leave."""
    deadline = time.monotonic() + patience_s
    while [folder for folder in cgroup_folders() if not _alive(folder) and not _removed(folder)]:
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _alive(folder: Path) -> bool:
    try:
        program = Path("/proc", folder.name.removeprefix(_PREFIX), "comm").read_text().strip()
    except OSError:
        return False
    return program == "unshare"


def _removed(folder: Path) -> bool:
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            Path(path).rmdir()
    return not folder.exists()


def clear_state(layout: Layout, *, keep_logs: bool) -> None:
    """Empty the state folder of a cluster that is gone; the lock's holder must be the caller."""
    for path in [layout.state / "nodes", layout.certificates]:
        shutil.rmtree(path, ignore_errors=True)
    for path in (layout.kubeconfig, layout.control, layout.record, layout.state / "audit-policy.json"):
        path.unlink(missing_ok=True)
    if not keep_logs:
        shutil.rmtree(layout.logs, ignore_errors=True)


def take_lock(layout: Layout) -> int | None:
    """A descriptor that holds the state folder's lock, or None while a cluster lives there."""
    layout.state.mkdir(parents=True, exist_ok=True)
    lock = os.open(layout.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def is_alive(layout: Layout) -> bool:
    """Whether a cluster lives in that state folder."""
    if not layout.lock.exists():
        return False
    lock = take_lock(layout)
    if lock is None:
        return True
    os.close(lock)
    return False
