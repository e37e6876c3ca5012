"""Environment that the server's process needs before vLLM is imported, beside the engine's own (`launch`).

A pod runs as a user that no passwd file knows, on a read-only root file system: libraries that ask for a user name
or write beneath HOME must find something that works.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from outrider_crds.runtime_config import MODEL_CACHE_DIR

from outrider_runtime.processor import any_server
from outrider_runtime.server.limits import MAX_CHOICES

_QUIET_TRACKER = "ignore:resource_tracker:UserWarning"
"""Python's tracker says after a process's last line what it cleaned up; that line is to be why the process ended."""


def server_environment(environ: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """What to add to `environ`; what the user set stays."""
    added = {"VLLM_MAX_N_SEQUENCES": str(MAX_CHOICES), "USER": _user_name(), "PYTHONWARNINGS": _QUIET_TRACKER}
    added |= any_server(environ)  # the engine's own process has it from the start, whatever vLLM imports there first
    if _writable(Path(MODEL_CACHE_DIR)):
        added["HF_HOME"] = MODEL_CACHE_DIR
        added["NUMBA_CACHE_DIR"] = f"{MODEL_CACHE_DIR}/numba"  # for what the image does not bring along compiled
    added = {name: value for name, value in added.items() if name not in environ}
    home = environ.get("HOME")
    if home is None or not _writable(Path(home)):
        added["HOME"] = str(_own_home(run_dir))
    return added


def _own_home(run_dir: Path) -> Path:
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
