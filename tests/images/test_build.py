"""The Dockerfile's targets, built: where buildah or Docker is, and their bases can be pulled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

import pytest

from setup.steps import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

MOST_MB = {"operator": 190, "runtime": 25, "runtime-cpu": 7000}
"""Target -> budget of what it has above its base (docs/how-to/build-images.md): of /opt."""
BASES = {"operator": ("PYTHON_IMAGE",), "runtime": ("PYTHON_IMAGE", "VLLM_IMAGE"), "runtime-cpu": ("PYTHON_IMAGE",)}
LARGE = ("runtime", "runtime-cpu")
"""Each takes over 10 GB of disk: built with OUTRIDER_BUILD_IMAGES=all."""


@pytest.fixture(scope="module")
def builder() -> str:
    """The program that builds images here."""
    if shutil.which("buildah"):
        return "buildah"
    if shutil.which("docker") and _run("docker", "info").returncode == 0:
        return "docker"
    pytest.skip("no image is built here: there is no buildah, and no Docker whose daemon answers")


@pytest.mark.parametrize("target", MOST_MB)
def test_a_target_is_built_and_keeps_its_budget(builder: str, target: str) -> None:
    """The Dockerfile's last steps start the programs, so that an image without a library that they need is not made."""
    if target in LARGE and os.environ.get("OUTRIDER_BUILD_IMAGES") != "all":
        pytest.skip(f"{target} takes over 10 GB: OUTRIDER_BUILD_IMAGES=all builds it")
    for base in (_base(argument) for argument in BASES[target]):
        if _run(builder, "pull", base).returncode != 0:
            pytest.skip(f"{target} is not built here: its base {base} cannot be pulled")
    image = f"localhost/outrider-test/{target}:budget"
    _check(_run(builder, "build", "--target", target, "--tag", image, "."))
    limit = f'test "$(du -sm /opt | cut -f1)" -le {MOST_MB[target]} || {{ du -sm /opt/*; exit 1; }}'
    _check(_run(builder, "build", "--file", "-", ".", text=f"FROM {image}\nUSER root\nRUN {limit}\n"))


def _base(argument: str) -> str:
    """Default of a build argument of the Dockerfile."""
    match = re.search(rf"^ARG {argument}=(\S+)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def _run(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=REPOSITORY, input=text, capture_output=True, text=True, check=False)


def _check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{_words(done.args)}:\n{(done.stdout + done.stderr)[-3000:]}"


def _words(command: Sequence[str]) -> str:
    return " ".join(command)
