"""Container images without a registry and without a build.

An image is a few empty folders; what a container runs is the machine's own, bind-mounted read-only by
containerd's base specification into every container, under whatever security context the pod has.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from setup.steps import REPOSITORY

PAUSE = "outrider.local/pause:dev"
_NONROOT = 65532
OURS = "/opt/outrider"
"""Folder in which containers find the checkout and the environment: under no folder that a pod mounts over."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives")


def write_pause_image(target: Path, pause: Path) -> None:
    """The sandbox image: one static binary."""
    layer = _Layer()
    layer.file("pause", pause.read_bytes(), mode=0o755)
    _write_image(target, [PAUSE], layer.finish(), {"Entrypoint": ["/pause"]})


def write_checkout_image(target: Path, names: Sequence[str]) -> None:
    """The image behind every name: runs as 65532, has the environment and our programs on its PATH."""
    layer = _Layer()
    for folder in ("dev", "etc", "etc/ssl", "home", "home/nonroot", "opt", "proc", "root", "run", "sys", "var"):
        layer.folder(folder)
    for folder in ("tmp", "var/tmp"):
        layer.folder(folder, mode=0o1777)
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            layer.link(str(path).lstrip("/"), str(path.readlink()))
    layer.file("etc/passwd", _passwd({"root": (0, "/root"), "nonroot": (_NONROOT, "/home/nonroot")}))
    layer.file("etc/group", f"root:x:0:\nnonroot:x:{_NONROOT}:\n".encode())
    layer.file("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    for name, entry in _programs().items():
        layer.file(f"{OURS}/bin/{name}".lstrip("/"), _program(entry), mode=0o755)
    _write_image(target, list(names), layer.finish(), _config())


def write_data_image(target: Path, name: str, files: Mapping[str, bytes]) -> None:
    """An image of files and nothing that runs, as models come in. files: path from the root -> content."""
    layer = _Layer()
    for path, content in files.items():
        layer.file(path, content)
    _write_image(target, [name], layer.finish(), {})


def _config() -> dict[str, Any]:
    """The image's settings; the environment's own scripts name the machine's paths, so ours come first."""
    checkout = f"{OURS}/checkout"
    roots = [f"{checkout}/{folder}" for folder in ("operator", "crds", "runtime")]
    environment = {
        "PATH": f"{OURS}/bin:{OURS}/venv/bin:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": ":".join([*roots, checkout]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return {
        "User": f"{_NONROOT}:{_NONROOT}",
        "Env": [f"{name}={value}" for name, value in environment.items()],
        "WorkingDir": "/",
        "Cmd": ["sh"],
    }


def _programs() -> dict[str, str]:
    """Our commands and the function behind each, as pip would install them."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return dict(project["scripts"])


def _program(entry: str) -> bytes:
    """Guarded as pip's own: a spawned process imports it, and must not serve once more."""
    module, function = entry.split(":")
    lines = [
        f"#!{OURS}/venv/bin/python",
        "import sys",
        f"from {module} import {function}",
        'if __name__ == "__main__":',
        f"    sys.exit({function}())",
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _passwd(users: dict[str, tuple[int, str]]) -> bytes:
    return "".join(f"{name}:x:{uid}:{uid}::{home}:/bin/sh\n" for name, (uid, home) in users.items()).encode()


def base_spec(default: dict[str, Any]) -> dict[str, Any]:
    """containerd's default container specification plus the machine's own folders, read-only."""
    own_paths = [_read_only(folder, folder) for folder in machine_folders()]
    ours = [_read_only(REPOSITORY, f"{OURS}/checkout"), _read_only(sys.prefix, f"{OURS}/venv")]
    return {**default, "mounts": [*default["mounts"], *own_paths, *ours]}


def machine_folders() -> list[Path]:
    """What a container needs of this machine: its system, this Python, its environment, the checkout."""
    system = [path for path in map(Path, _SYSTEM) if path.is_dir() and not path.is_symlink()]
    python = Path(sys.base_prefix)
    ours = {python, python.resolve(), Path(sys.executable).resolve().parents[1], Path(sys.prefix), REPOSITORY}
    kept = system
    for folder in sorted(ours):  # parents sort before what is in them
        if not any(folder.is_relative_to(parent) for parent in kept):
            kept.append(folder)
    return kept


def _read_only(source: Path | str, destination: Path | str) -> dict[str, Any]:
    return {"destination": str(destination), "source": str(source), "type": "bind", "options": ["rbind", "ro"]}


class _Layer:
    """A layer's tar archive in memory; the same content gives the same bytes."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.TarFile(fileobj=self._buffer, mode="w")

    def folder(self, name: str, mode: int = 0o755) -> None:
        self._add(name, tarfile.DIRTYPE, mode=mode)

    def link(self, name: str, target: str) -> None:
        self._add(name, tarfile.SYMTYPE, linkname=target)

    def file(self, name: str, content: bytes, mode: int = 0o644) -> None:
        self._add(name, tarfile.REGTYPE, content, mode)

    def finish(self) -> bytes:
        self._tar.close()
        return self._buffer.getvalue()

    def _add(self, name: str, kind: bytes, content: bytes = b"", mode: int = 0o777, linkname: str = "") -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.linkname, entry.size = kind, mode, linkname, len(content)
        self._tar.addfile(entry, io.BytesIO(content))


def _write_image(target: Path, names: list[str], layer: bytes, config: dict[str, Any]) -> None:
    """Writes an image in the format that `docker save` writes and `ctr images import` reads."""
    description = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": names, "Layers": ["layer.tar"]}]
    archive = _Layer()
    archive.file("layer.tar", layer)
    archive.file("config.json", json.dumps(description).encode())
    archive.file("manifest.json", json.dumps(manifest).encode())
    target.write_bytes(archive.finish())
