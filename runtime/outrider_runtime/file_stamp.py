"""Tells whether a file has changed since it was last read."""

from __future__ import annotations

from pathlib import Path

FileStamp = tuple[int, int, int]


def stamp(path: Path) -> FileStamp | None:
    """Return a value that changes with the file that `path` resolves to; None while it is missing.

    It has the inode, as a ConfigMap volume changes by swapping a symlink, and the size: a file that was read while it
    was empty, in the midst of an edit, may have the same time afterwards, since clocks of file systems tick every 4 ms.
    """
    try:
        status = path.stat()
    except OSError:  # it is missing, or an editor is replacing it
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
