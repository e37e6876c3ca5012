"""The server that the tests of this folder share: the example's manifest on this machine, without Kubernetes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import outrider_cpu
import pytest
import torch
import yaml

from tests.engine.engines import DEVICE, EAGLE_HEAD
from tests.engine.planted_models import Counting, counting
from tests.engine.server_process import EXAMPLE, TARGET, Server
from tests.otlp_receiver import Receiver, receiving

if DEVICE == "cpu":
    os.environ.update(outrider_cpu.ENVIRONMENT)  # before any test imports vLLM

BROKEN = "broken"
"""A drafter of the shared server, and its folder."""


@dataclass(frozen=True)
class Laptop:
    """A server started with `-f`, its manifest, and the folder that it reads latency profiles from."""

    server: Server
    manifest: Path
    profiles: Path
    run_volume: Path
    """Folder in which the server makes its run folder."""
    receiver: Receiver
    """Gets the server's spans."""

    def edit(self, **speculation: object) -> None:
        """Change `spec.speculation` in the manifest."""
        document = yaml.safe_load(self.manifest.read_text())
        document["spec"]["speculation"] |= speculation
        self.manifest.write_text(yaml.safe_dump(document))

    @contextmanager
    def speculating(self) -> Iterator[None]:
        """Draft at every step, whatever the loop decides: on a busy machine its probes may say that it does not pay."""
        before = self.server.state().config_hash
        self.edit(mode="Static")
        self.server.wait_until("the new config", lambda: self.server.state().config_hash != before)
        try:
            yield
        finally:
            self.edit(mode="ClosedLoop")
            self.server.wait_until("the old config", lambda: self.server.state().config_hash == before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for planted models, whose random weights are the same in every run."""
    torch.manual_seed(0)
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Counting:
    """A small target and its drafters, for tests that ask of an answer only that it stays the same."""
    return counting(tmp_path_factory.mktemp("counting"))


@pytest.fixture(scope="session")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    """One for the whole session: loading vLLM takes most of a minute. It sends spans, and one of its drafters cannot be
    loaded."""
    folder = tmp_path_factory.mktemp("server")
    manifest, profiles, run_volume = _manifest(folder), folder / "profiles", folder / "run"
    profiles.mkdir()
    run_volume.mkdir()
    with receiving() as receiver:
        server = Server(
            folder / "server.log", TARGET.name, "-f", str(manifest), "--profiles", str(profiles),
            environment={"OUTRIDER_RUN_DIR": str(run_volume), **receiver.variables},
        )  # fmt: skip
        try:
            server.wait_until("readiness", server.is_ready)
            yield Laptop(server, manifest, profiles, run_volume, receiver)
        finally:
            server.stop()


def _manifest(folder: Path) -> Path:
    """The example, and an EAGLE-3 head whose weights end in the middle."""
    broken = folder / BROKEN
    shutil.copytree(EAGLE_HEAD, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 1 << 20])
    document = yaml.safe_load(EXAMPLE.read_text())
    head = {"name": BROKEN, "source": {"hostPath": {"path": str(broken)}}}
    document["spec"]["draftPool"].append({"name": BROKEN, "method": "Eagle", "eagle": {"model": head}})
    manifest = folder / "service.yaml"
    manifest.write_text(yaml.safe_dump(document))
    return manifest
