"""What the safetensors files of a draft say before they are loaded: whether they are whole, and names of tensors."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

INDEX_FILE = "model.safetensors.index.json"
LENGTH = struct.Struct("<Q")
"""Length of the header in bytes, at the start of each file."""
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_METADATA = "__metadata__"


class UnreadableCheckpointError(ValueError):
    """A file of a draft's weights is damaged; the message names the file."""


def tensor_names(location: str) -> set[str]:
    """Return the names of a local draft's tensors; empty for one on the hub or in another format.

    Raises UnreadableCheckpointError.
    """
    folder = Path(location)
    present = set(folder.glob("*.safetensors"))
    if not present:  # of a bucket, only the JSON files are here
        return set()
    files = present | {folder / name for name in _indexed_files(folder)}
    return {name for file in sorted(files) for name in _header(file)}


def _indexed_files(folder: Path) -> set[str]:
    file = folder / INDEX_FILE
    if not file.is_file():
        return set()
    try:
        return {str(name) for name in json.loads(file.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableCheckpointError(f"{file} cannot be read: {error}") from None


def _header(file: Path) -> dict[str, Any]:
    """Read the description of each tensor, by name."""
    damaged = UnreadableCheckpointError(f"{file} is damaged or cut off: save or download it again")
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(LENGTH.size)
            length = LENGTH.unpack(start)[0] if len(start) == LENGTH.size else size
            if length > min(size - LENGTH.size, MAX_HEADER_BYTES):
                raise damaged
            tensors: dict[str, Any] = json.loads(opened.read(length))
        tensors.pop(_METADATA, None)
        ends = [tensor["data_offsets"][1] for tensor in tensors.values()]
    except OSError as error:
        raise UnreadableCheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise damaged from None
    if LENGTH.size + length + max(ends, default=0) > size:
        raise damaged
    return tensors
