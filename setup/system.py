"""What comes from Debian's packages: installed only where it is missing, with no service started."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from setup.steps import CACHE, SetupError, build_once, hold_lock, run

_PROGRAMS = {
    "containerd": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
    "g++": "g++",  # vLLM on a CPU compiles its kernels at start
    "git": "git",
}
_IMAGE_PROGRAMS = {"buildah": "buildah", "mmdebstrap": "mmdebstrap"}
"""What tests/images needs where OUTRIDER_BUILD_IMAGES asks it to build."""
_CNI_PLUGINS = [Path(folder) / "ptp" for folder in ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")]
_POLICY = Path("/usr/sbin/policy-rc.d")


def packages() -> None:
    """Install what is missing; nothing at all happens, apt included, where nothing is."""
    extend_path()
    if missing := missing_packages():
        install(missing)


def missing_packages() -> list[str]:
    """The packages whose program, library or header is not on this machine."""
    programs = _PROGRAMS | (_IMAGE_PROGRAMS if os.environ.get("OUTRIDER_BUILD_IMAGES") else {})
    missing = [package for program, package in programs.items() if shutil.which(program) is None]
    if not any(plugin.exists() for plugin in _CNI_PLUGINS):
        missing.append("containernetworking-plugins")
    if ctypes.util.find_library("numa") is None:
        missing.append("libnuma1")  # vLLM on a CPU links it
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append("python3-dev")  # and compiles against this
    return missing


def extend_path() -> None:
    """A root shell may lack the folders of system programs."""
    folders = os.environ.get("PATH", "").split(":")
    os.environ["PATH"] = ":".join([*folders, *(folder for folder in ("/usr/sbin", "/sbin") if folder not in folders)])


def prometheus() -> Path:
    """The prometheus binary of Debian's package, unpacked into the cache: no service, no user."""
    build_once(CACHE / "prometheus", lambda folder: _unpack("prometheus", folder))
    return prometheus_folder() / "prometheus"


def prometheus_folder() -> Path:
    """Folder of prometheus; it may not exist yet."""
    return CACHE / "prometheus" / "usr" / "bin"


def debian_with_python() -> Path:
    """A tar archive of a small Debian with Python and pip, of this machine's release, from its packages' servers."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    target = CACHE / "images" / f"python-{release}.tar"
    if not target.exists():
        with hold_lock("debian"):
            if not target.exists():
                _bootstrap(release, target)
    return target


def _bootstrap(release: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"partial-{target.name}")  # its end says that it is a tar archive
    packages = "--include=python3,python3-pip,ca-certificates"
    command = ["mmdebstrap", "--mode=root", "--variant=minbase", packages, release, str(partial)]
    run(f"debian: {release} with Python from its packages (half a minute, once)", command)
    partial.rename(target)


def install(missing: list[str]) -> None:
    """Install Debian packages; SetupError where that is not ours to do."""
    packages = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(f"This machine lacks {packages}: run `apt-get install {packages}` as root, or what equals it.")
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    with hold_lock("apt"), _no_services():
        run("apt-get update", ["apt-get", "update", "-qq"])
        run(f"apt-get install {packages}", command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def _unpack(package: str, folder: Path) -> None:
    """Download a package and unpack it, as any user."""
    (folder / "package").mkdir(parents=True)
    download = ["apt-get", "download", "-qq", package]
    if subprocess.run(["apt-cache", "show", package], capture_output=True, check=False).returncode != 0:
        run("apt-get update", ["apt-get", "update", "-qq"])
    run(f"{package}: downloading its Debian package", download, cwd=folder / "package")
    archive = next((folder / "package").glob("*.deb"))
    run(f"{package}: unpacking", ["dpkg-deb", "--extract", str(archive), str(folder)])
    shutil.rmtree(folder / "package")


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """Debian's way to say that packages start nothing, for the time of one installation."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()
