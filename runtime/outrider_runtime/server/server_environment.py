"""Environment variables that the server's process needs before vLLM is imported. `launch` adds the engine's own.

A pod runs as a user that is not in the passwd file, on a read-only root file system. Libraries that look up the user's
name or write into HOME need values that work there.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from outrider_crds.runtime_config import MODEL_CACHE_DIR

from outrider_runtime.processor import portable_cpu_variables
from outrider_runtime.server.limits import MAX_CHOICES

_QUIET_TRACKER = "ignore:resource_tracker:UserWarning"
"""Silences Python's resource tracker, which prints after a process's last line. Kubernetes keeps that last line as the
termination message, so it must say why the process ended."""


def server_environment(environ: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """Return the variables to add to `environ`. The user's own are kept, except a HOME that cannot be written."""
    added = {"VLLM_MAX_N_SEQUENCES": str(MAX_CHOICES), "USER": _user_name(), "PYTHONWARNINGS": _QUIET_TRACKER}
    added |= portable_cpu_variables(environ)  # here, since numba reads them once
    if _writable(Path(MODEL_CACHE_DIR)):
        added["HF_HOME"] = MODEL_CACHE_DIR
        added["NUMBA_CACHE_DIR"] = f"{MODEL_CACHE_DIR}/numba"  # code that the image does not have compiled
    added = {name: value for name, value in added.items() if name not in environ}
    home = environ.get("HOME")
    if home is None or not _writable(Path(home)):
        added["HOME"] = str(_make_home(run_dir))
    return added


def _make_home(run_dir: Path) -> Path:
    home = run_dir / "home"
    home.mkdir(exist_ok=True)
    return home


def _writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return "outrider"
