"""What builds images on this machine, and the bases that the Dockerfile's targets stand on."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from setup import system
from setup.steps import REPOSITORY

BASES = {
    "operator": ("PYTHON_IMAGE",),
    "runtime": ("PYTHON_IMAGE", "VLLM_IMAGE"),
    "runtime-cpu": ("PYTHON_IMAGE",),
    "plugin": ("PYTHON_IMAGE", "INIT_IMAGE"),
}
"""Target -> build arguments that name its bases."""
_OWN_PYTHON = "localhost/outrider-test/python:debian"
_OWN_PYTHON_STEPS = """
FROM scratch
ADD {archive} /
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED \\
 && python3 -m pip install --no-cache-dir --root-user-action=ignore --ignore-installed pip \\
 && apt-mark manual python3 ca-certificates \\
 && apt-get purge --yes --autoremove python3-pip \\
 && rm -rf /var/lib/apt/lists/* /var/cache/apt
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
"""
"""Makes a stand-in for Docker's python image: pip is of PyPI, so that it can be uninstalled as it can there."""
_OF_THIS_MACHINE = ("/etc/ssl/certs", "/etc/pip.conf")
"""What pip needs here to reach its index; no part of an image."""


@dataclass(frozen=True)
class Builder:
    command: tuple[str, ...]
    options: tuple[str, ...]
    """Options of each build, for example `--isolation chroot`."""

    @property
    def is_buildah(self) -> bool:
        return Path(self.command[0]).name == "buildah"

    def run(self, verb: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [*self.command, verb, *(self.options if verb == "build" else ()), *arguments]
        return subprocess.run(command, cwd=REPOSITORY, input=text, capture_output=True, text=True, check=False)

    def build(self, target: str) -> str:
        """Name of the Dockerfile's `target`, built."""
        image = f"localhost/outrider-test/{target}:dev"
        bases = (f"--build-arg={argument}={self._base(argument)}" for argument in BASES[target])
        check(self.run("build", *bases, "--target", target, "--tag", image, "."))
        return image

    def save(self, image: str, archive: Path) -> None:
        """Write the image as `docker save` does."""
        if self.is_buildah:
            check(self.run("push", image, f"docker-archive:{archive}:{image}"))
        else:
            check(self.run("save", "--output", str(archive), image))

    def _base(self, argument: str) -> str:
        """The base that OUTRIDER_<argument> names, else the Dockerfile's, else one made here; skips without any."""
        match = re.search(rf"^ARG {argument}=(\S+)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
        assert match is not None
        base = os.environ.get(f"OUTRIDER_{argument}") or match[1]
        if self._has(base) or self.run("pull", base).returncode == 0:
            return base
        if argument != "VLLM_IMAGE" and self.is_buildah and os.geteuid() == 0 and shutil.which("mmdebstrap"):
            return self._own_python()
        pytest.skip(f"the base {base} can neither be pulled nor made here")

    def _own_python(self) -> str:
        if not self._has(_OWN_PYTHON):
            archive = system.debian_with_python()
            steps = _OWN_PYTHON_STEPS.format(archive=archive.name)
            check(self.run("build", "--file", "-", "--tag", _OWN_PYTHON, str(archive.parent), text=steps))
        return _OWN_PYTHON

    def _has(self, image: str) -> bool:
        kind = ("--type", "image") if self.is_buildah else ()
        return self.run("inspect", *kind, image).returncode == 0


def builder() -> Builder:
    """The program that builds images here; skips without one. OUTRIDER_BUILDER and OUTRIDER_BUILD_OPTIONS name another
    program, and options."""
    chosen = shlex.split(os.environ.get("OUTRIDER_BUILDER", ""))
    buildah = Builder(tuple(chosen) or ("buildah",), ())
    if buildah.is_buildah and shutil.which(buildah.command[0]):
        return Builder(buildah.command, _options() or _buildah_options())
    docker = Builder(tuple(chosen) or ("docker",), _options())
    if shutil.which(docker.command[0]) and docker.run("info").returncode == 0:
        return docker
    pytest.skip("no image is built here: there is no buildah, and no Docker whose daemon answers")


def _options() -> tuple[str, ...]:
    return tuple(shlex.split(os.environ.get("OUTRIDER_BUILD_OPTIONS", "")))


def _buildah_options() -> tuple[str, ...]:
    """A build that needs no rights beyond root's, reaches what this machine reaches, and keeps its layers."""
    volumes = (f"--volume={path}:{path}:ro" for path in _OF_THIS_MACHINE if Path(path).exists())
    return ("--layers", "--isolation=chroot", "--network=host", *volumes)


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{' '.join(done.args)}:\n{(done.stdout + done.stderr)[-3000:]}"
