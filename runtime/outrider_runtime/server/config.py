"""Reads what to serve: from the files that the operator mounts, or from a manifest."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from outrider_crds.runtime_config import BootConfig, HotConfig
from pydantic import ValidationError

from outrider_runtime.local_manifest import LocalManifestError, load_local_service
from outrider_runtime.paths import RUN_DIR_VARIABLE, Paths
from outrider_runtime.server.server_errors import StartupError

_TMPFS = Path("/dev/shm")
_RUN_FOLDER_PREFIX = "outrider-"
_LOCK_FILE = "lock"
_Config = TypeVar("_Config", BootConfig, HotConfig)


@dataclass(frozen=True, slots=True)
class Serving:
    """The configuration that one server starts with, and the paths of its files."""

    boot: BootConfig
    """Configuration that only a restart changes."""
    hot: HotConfig
    """Configuration at the start; its file is watched, and changes take effect while the server runs."""
    paths: Paths
    drain_timeout_s: float | None = None
    """Seconds that running requests may take after a signal; None: the process's caller sets a limit."""


def read_mounted_config(boot_file: Path, paths: Paths) -> Serving:
    """Read the two files that the operator mounts. Raises StartupError when one cannot be used."""
    boot = _read_config_file(boot_file, "boot config", BootConfig.read)
    hot = _read_config_file(Path(paths.hot_file), "hot config", HotConfig.read)
    return Serving(boot, hot, paths)


def read_local_manifest(manifest: Path, model_root: Path, paths: Paths) -> Serving:
    """Read a manifest, without Kubernetes, and write its hot config into the run folder, where the engine reads it."""
    try:
        service = load_local_service(manifest, model_root)
    except LocalManifestError as error:
        raise StartupError(str(error)) from error
    hot_file = Path(paths.run_dir, "hot.json")
    write_hot(hot_file, service.hot)
    local = paths.model_copy(update={"hot_file": str(hot_file), "mounted": False})
    return Serving(service.boot, service.hot, local, service.drain_timeout_s)


def write_hot(file: Path, hot: HotConfig) -> None:
    """Replace the hot config atomically: a reader sees the old file or the new one."""
    part = file.with_suffix(".part")
    part.write_text(hot.model_dump_json(by_alias=True, exclude_none=True), encoding="utf-8")
    part.replace(file)


def run_folder(environ: Mapping[str, str] = os.environ, *, keep_others: bool = False) -> Path:
    """Make a folder for the files that the server's processes exchange. Raises StartupError if that is impossible.

    The folder lies in `OUTRIDER_RUN_DIR`, else in `/dev/shm` (memory), else in the system's temporary folder. A pod
    sets `OUTRIDER_RUN_DIR` to a volume. Run folders that a crashed container left there are deleted first: their state
    must not be taken for this process's. keep_others: the volume may be shared with an engine that runs, so only the
    folders of processes that are gone are deleted.
    """
    volume = environ.get(RUN_DIR_VARIABLE)
    try:
        parent = Path(volume or (_TMPFS if os.access(_TMPFS, os.W_OK) else tempfile.gettempdir()))
        for stale in parent.glob(f"{_RUN_FOLDER_PREFIX}*"):
            if (volume and not keep_others) or _is_abandoned(stale):
                shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_RUN_FOLDER_PREFIX, dir=parent))
    except OSError as error:
        raise StartupError(
            f"cannot make the run folder ({error}); set {RUN_DIR_VARIABLE} to a writable folder, "
            "or mount a writable /tmp"
        ) from error
    with suppress(OSError):  # a volume without locks: the folder stays if this process is killed
        _lock(folder)
    return folder


def _lock(folder: Path) -> None:
    """Lock the folder until this process and its forked children have ended; SIGKILL ends a lock, too."""
    unlocked = folder / f"{_LOCK_FILE}.part"
    descriptor = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)  # stays open
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unlocked.rename(folder / _LOCK_FILE)  # appears locked: others must not take it for abandoned


def _is_abandoned(folder: Path) -> bool:
    """Return whether the folder was locked once, and no process has the lock. Process ids differ between containers."""
    try:
        with (folder / _LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read_config_file(file: Path, what: str, parse: Callable[[str], _Config]) -> _Config:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the {what} {file}: {error}") from error
    except ValidationError as error:
        raise StartupError(f"the {what} {file} is not valid: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """Return every problem as `field: message`, on one line."""
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc']) or 'document'}: {problem['msg']}"
        for problem in error.errors(include_url=False)
    )
