"""Files that others read while they are written."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file; who reads it finds what was there before or all of it. Raises OSError, and leaves no part."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
