"""What to serve, read from the files that the operator mounts or from a manifest."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from outrider_crds.runtime_config import BootConfig, HotConfig
from pydantic import ValidationError

from outrider_runtime.local_manifest import LocalManifestError, load_local_service
from outrider_runtime.paths import RUN_DIR_VARIABLE, Paths
from outrider_runtime.server.errors import StartupError

_TMPFS = Path("/dev/shm")
_PREFIX = "outrider-"
_Config = TypeVar("_Config", BootConfig, HotConfig)


@dataclass(frozen=True, slots=True)
class Serving:
    """One server's work: its configuration at the start, and where its files are."""

    boot: BootConfig
    hot: HotConfig
    paths: Paths


def from_config(boot_file: Path, paths: Paths) -> Serving:
    """Serve what the operator mounted. Raises StartupError when a config cannot be used."""
    boot = _read(boot_file, "boot config", BootConfig.read)
    hot = _read(Path(paths.hot_file), "hot config", HotConfig.read)
    return Serving(boot, hot, paths)


def from_manifest(manifest: Path, model_root: Path, paths: Paths) -> Serving:
    """Serve a manifest without Kubernetes; its hot config goes into the run folder, where the engine reads it."""
    try:
        service = load_local_service(manifest, model_root)
    except LocalManifestError as error:
        raise StartupError(str(error)) from error
    hot_file = Path(paths.run_dir, "hot.json")
    write_hot(hot_file, service.hot)
    local = paths.model_copy(update={"hot_file": str(hot_file), "mounted": False})
    return Serving(service.boot, service.hot, local)


def write_hot(file: Path, hot: HotConfig) -> None:
    """Replace the hot config in one step, so that no reader sees half of it."""
    part = file.with_suffix(".part")
    part.write_text(hot.model_dump_json(by_alias=True, exclude_none=True), encoding="utf-8")
    part.replace(file)


def run_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """A folder of this process's own for what crosses between its processes, in memory where there is some.

    Beneath OUTRIDER_RUN_DIR where that is set: a volume of the pod's, on which a container that crashed may have left
    its own, with a state that must not pass for this process's. Raises StartupError when nothing can be written.
    """
    volume = environ.get(RUN_DIR_VARIABLE)
    if volume:
        for left in Path(volume).glob(f"{_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
    parent = volume or (_TMPFS if os.access(_TMPFS, os.W_OK) else None)
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise StartupError(
            f"no folder to write to ({error}); set {RUN_DIR_VARIABLE} to one, or mount a writable /tmp"
        ) from error


def _read(file: Path, what: str, parse: Callable[[str], _Config]) -> _Config:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the {what} {file}: {error}") from error
    except ValidationError as error:
        raise StartupError(f"the {what} {file} is not valid: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """Every problem as `field: message`, on one line."""
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc']) or 'document'}: {problem['msg']}"
        for problem in error.errors(include_url=False)
    )
