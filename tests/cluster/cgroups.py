"""The parent cgroup of a cluster's pods: all of a cluster that may outlive it, empty, for the next to clear."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_PREFIX = "outrider-"
_CGROUPS = Path("/sys/fs/cgroup")


def name_of(pid: int) -> str:
    """The parent of a cluster's containers, named after its first process."""
    return f"{_PREFIX}{pid}"


def create(name: str) -> None:
    """Make it, with the weight that a kubelet gives its pods: the machine's cores.

    By default all pods together would weigh as much as one process and starve next to it; with much more
    than this, pods that compute would starve the control plane.
    """
    for hierarchy in _hierarchies():
        (hierarchy / name).mkdir(exist_ok=True)


def _hierarchies() -> list[Path]:
    """Folders in which cgroups are made: in each controller's folder (v1) or in the only one (v2)."""
    if (_CGROUPS / "cgroup.procs").exists():
        return [_CGROUPS]
    return [folder.parent for folder in _CGROUPS.glob("*/cgroup.procs") if folder.parent.name != "unified"]


def folders() -> list[Path]:
    """Every such cgroup of this machine: one for each controller (v1) or one in all (v2)."""
    return [*_CGROUPS.glob(f"{_PREFIX}*"), *_CGROUPS.glob(f"*/{_PREFIX}*")]


def remove_dead(patience_s: float = 0.0) -> None:
    """Remove those whose cluster is gone; its last processes may take a moment to leave."""
    deadline = time.monotonic() + patience_s
    while [folder for folder in folders() if not _alive(folder) and not _removed(folder)]:
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _alive(folder: Path) -> bool:
    """Whether the first process lives: one that was killed may still wait to be collected."""
    try:
        program, state = Path("/proc", folder.name.removeprefix(_PREFIX), "stat").read_text().split()[1:3]
    except OSError:
        return False
    return program == "(unshare)" and state not in "XZ"


def _removed(folder: Path) -> bool:
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            Path(path).rmdir()
    return not folder.exists()
