"""The Dockerfile's targets, built: where buildah or Docker is, and their bases can be pulled."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from setup.steps import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

MOST_MB = {"operator": 190, "runtime": 25, "runtime-cpu": 7000}
"""Target -> budget of what it has above its base (docs/how-to/build-images.md): of /opt."""
BASES = {"operator": ("PYTHON_IMAGE",), "runtime": ("PYTHON_IMAGE", "VLLM_IMAGE"), "runtime-cpu": ("PYTHON_IMAGE",)}
LARGE = ("runtime", "runtime-cpu")
"""Each takes over 10 GB of disk: built with OUTRIDER_BUILD_IMAGES=all."""


@dataclass(frozen=True)
class Builder:
    command: tuple[str, ...]
    options: tuple[str, ...]
    """Options of each build, for example `--isolation chroot`."""

    def run(self, verb: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [*self.command, verb, *(self.options if verb == "build" else ()), *arguments]
        return subprocess.run(command, cwd=REPOSITORY, input=text, capture_output=True, text=True, check=False)

    def has(self, image: str) -> bool:
        """Whether `image` is there, or can be pulled."""
        inspect = ("--type", "image") if self.command[0].endswith("buildah") else ()
        return self.run("inspect", *inspect, image).returncode == 0 or self.run("pull", image).returncode == 0


@pytest.fixture(scope="module")
def builder() -> Builder:
    """What builds images here; OUTRIDER_BUILDER and OUTRIDER_BUILD_OPTIONS name another program, and options."""
    options = tuple(shlex.split(os.environ.get("OUTRIDER_BUILD_OPTIONS", "")))
    if chosen := os.environ.get("OUTRIDER_BUILDER"):
        return Builder(tuple(shlex.split(chosen)), options)
    if shutil.which("buildah"):
        return Builder(("buildah",), options)
    docker = Builder(("docker",), options)
    if shutil.which("docker") and docker.run("info").returncode == 0:
        return docker
    pytest.skip("no image is built here: there is no buildah, and no Docker whose daemon answers")


@pytest.mark.parametrize("target", MOST_MB)
def test_a_target_is_built_and_keeps_its_budget(builder: Builder, target: str) -> None:
    """The Dockerfile's last steps start the programs, so that an image without a library that they need is not made."""
    if target in LARGE and os.environ.get("OUTRIDER_BUILD_IMAGES") != "all":
        pytest.skip(f"{target} takes over 10 GB: OUTRIDER_BUILD_IMAGES=all builds it")
    bases = {argument: _base(argument) for argument in BASES[target]}
    for base in bases.values():
        if not builder.has(base):
            pytest.skip(f"{target} is not built here: its base {base} cannot be pulled")
    image = f"localhost/outrider-test/{target}:budget"
    chosen = [word for argument, base in bases.items() for word in ("--build-arg", f"{argument}={base}")]
    _check(builder.run("build", *chosen, "--target", target, "--tag", image, "."))
    limit = f'test "$(du -sm /opt | cut -f1)" -le {MOST_MB[target]} || {{ du -sm /opt/*; exit 1; }}'
    _check(builder.run("build", "--file", "-", ".", text=f"FROM {image}\nUSER root\nRUN {limit}\n"))


def _base(argument: str) -> str:
    """The base that OUTRIDER_<argument> names, else the Dockerfile's."""
    match = re.search(rf"^ARG {argument}=(\S+)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    assert match is not None
    return os.environ.get(f"OUTRIDER_{argument}") or match[1]


def _check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{_words(done.args)}:\n{(done.stdout + done.stderr)[-3000:]}"


def _words(command: Sequence[str]) -> str:
    return " ".join(command)
