"""Size of the KV cache of an engine on CPUs, from the container's memory limit."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30


def cpu_cache_gib(limit_bytes: int | None) -> int:
    """Return GiB of KV cache: a quarter of the memory limit; 2 without a limit, to leave memory to other programs."""
    return 2 if limit_bytes is None else max(1, limit_bytes // (4 * GIB))


def memory_limit_bytes() -> int | None:
    """Return the container's memory limit; None without one."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:  # cgroup v1 writes a huge number for "no limit"
            return int(text)
    return None
