"""The file systems of a cluster's mount namespace: what programs write at fixed places must not stay."""

from __future__ import annotations

import os
from pathlib import Path

from setup.steps import CACHE
from tests.cluster.errors import ClusterError
from tests.cluster.layout import MODELS, VOLATILE
from tests.cluster.processes import run

_OVERLAID = (Path("/var/lib"), Path("/var/log"), Path("/srv"))
_HOSTS = "127.0.0.1 localhost outrider.local\n"


def refuse_hidden(state: Path) -> None:
    """The machine must see the state folder as the cluster does."""
    for folder in (VOLATILE, Path("/var/run"), *_OVERLAID):
        if state.is_relative_to(folder):
            raise ClusterError(f"The state folder {state} lies in {folder}, which the cluster hides: choose another.")


def build(models: Path = CACHE / "models") -> None:
    """Lay tmpfs over /run and over what is written in /var/lib, /var/log and /srv.

    CNI's books, the kubelet's sockets and containers' shims go there whatever their options say.
    """
    run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(VOLATILE)])
    for folder in filter(Path.is_dir, _OVERLAID):
        _overlay(folder)
    (VOLATILE / "netns").mkdir()
    (VOLATILE / "lock").mkdir()
    _closed_names()
    models.mkdir(parents=True, exist_ok=True)
    MODELS.mkdir(exist_ok=True)
    run(["mount", "--bind", "-o", "ro", str(models), str(MODELS)])


def _overlay(folder: Path) -> None:
    own = VOLATILE / "overlays" / folder.name
    for part in ("upper", "work"):
        (own / part).mkdir(parents=True)
    options = f"lowerdir={folder},upperdir={own / 'upper'},workdir={own / 'work'}"
    run(["mount", "-t", "overlay", "-o", options, "overlay", str(folder)])


def _closed_names() -> None:
    """Nothing outside can be reached from here: make every look-up fail at once, not after a timeout."""
    hosts = VOLATILE / "hosts"
    hosts.write_text(_HOSTS)
    resolv = VOLATILE / "resolv.conf"
    resolv.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    for source, target in ((hosts, "/etc/hosts"), (resolv, os.path.realpath("/etc/resolv.conf"))):
        if Path(target).exists():
            run(["mount", "--bind", str(source), target])
