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
    """Make it, with weight: by default all pods together weigh as much as one process, and starve beside it.

    A kubelet gives its pods the weight of the machine's cores against that of all system processes in
    one group. Here each of those, some ten of the control plane's, stands for itself: hence ten times as much.
    """
    weight = 10 * 1024 * (os.cpu_count() or 1)
    for shares in _CGROUPS.glob("*/cpu.shares"):  # v1; "cpu" and "cpu,cpuacct" may be one folder
        (shares.parent / name).mkdir(exist_ok=True)
        (shares.parent / name / "cpu.shares").write_text(str(weight))
    if (_CGROUPS / "cgroup.controllers").exists():  # v2
        (_CGROUPS / name).mkdir(exist_ok=True)
        if (_CGROUPS / name / "cpu.weight").exists():
            (_CGROUPS / name / "cpu.weight").write_text(str(min(10_000, weight * 100 // 1024)))


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
