"""arctic-inference, the library of suffix decoding, in the environment: from PyPI, which has its source alone.

Its own build would first install a torch of another version, gigabytes, and compile nothing against it. Here the
build runs in the environment, whose torch will do, with its tools beside: 40 seconds, once (uv keeps the wheel).
"""

from __future__ import annotations

import os
import subprocess
import tomllib

from setup.environment import PYTHON, environment, uv
from setup.steps import CACHE, REPOSITORY, SetupError, locked, run, say

_MODULE = "arctic_inference.suffix_decoding"
_TOOLS = CACHE / "suffix-tools"


def suffix_decoding() -> None:
    """Install it where it can be built. Everything else works without: a machine that cannot is told so, no more."""
    environment()
    if _is_there():
        return
    try:
        with locked("suffix"):
            if not _is_there():
                _install()
    except SetupError as error:
        say(
            f"  suffix decoding: {requirement()} cannot be built here; a drafter of method Suffix is left out of its "
            f"pool, and its tests are skipped. {error}"
        )


def requirement() -> str:
    """As pyproject.toml asks for it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = project["optional-dependencies"]["suffix"]
    return str(wanted)


def _is_there() -> bool:
    command = [str(PYTHON), "-c", f"import {_MODULE}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _install() -> None:
    into = [uv(), "pip", "install", "--quiet", "--python", str(PYTHON)]
    setup = REPOSITORY / "setup"
    tools = ["--target", str(_TOOLS), "--requirement", str(setup / "suffix-tools.txt")]
    run("suffix: installing its build tools", [*into, *tools, "--constraint", str(setup / "constraints.txt")])
    build = {
        **os.environ,
        "PYTHONPATH": str(_TOOLS),
        "PATH": f"{_TOOLS / 'bin'}:{os.environ.get('PATH', '')}",
        "CMAKE_ARGS": f"-DPython_EXECUTABLE={PYTHON}",  # else CMake takes the first Python that it finds
    }
    run(
        f"suffix: building {requirement()} (about 40 s, once)",
        [*into, "--no-build-isolation", "--no-deps", requirement()],
        env=build,
    )
    if not _is_there():
        raise SetupError(f"It was built, and {PYTHON} cannot import {_MODULE}.")
