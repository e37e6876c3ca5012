"""What a cluster leaves in its state folder, and whether one lives there."""

from __future__ import annotations

import fcntl
import os
import shutil

from tests.cluster.layout import Layout


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
