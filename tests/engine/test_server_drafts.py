"""A drafter that looks right and cannot be loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.server_process import EXAMPLE, REPETITIVE, TARGET, Server

pytestmark = pytest.mark.model


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """The example, with an EAGLE-3 head whose weights end in the middle."""
    head = tmp_path / "models" / "smollm2-135m-eagle3"
    shutil.copytree(EXAMPLE.parent / "models" / head.name, head)
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 1 << 20])
    root = tmp_path / "root"  # without the head that lies in the usual place
    root.mkdir()
    (root / TARGET.name).symlink_to(TARGET)
    manifest = tmp_path / "service.yaml"
    manifest.write_text(EXAMPLE.read_text())
    made = Server(tmp_path / "server.log", TARGET.name, "-f", str(manifest), "--model-root", str(root))
    yield made
    made.stop()


def test_a_drafter_that_cannot_load_is_dropped_and_named(server: Server) -> None:
    """The pod drops it, serves on, and names it; it does not crash in a loop."""
    server.wait_until("readiness", server.is_ready)
    lookup, eagle = server.state().drafters
    assert lookup.loaded
    assert not eagle.loaded
    assert "cannot be started" in eagle.reason
    assert server.chat(REPETITIVE, max_tokens=48, temperature=0).status_code == 200
    state = server.settled_state()
    assert state.plugin_active
    assert state.drafters[0].verified > 0, "what is left of the pool is used"
    assert server.metric("outrider_drafter_loaded", drafter="eagle") == 0
    log = server.log.read_text(errors="replace")
    assert "drafter 'eagle' is left out" in log
    assert "starting again" not in log, "the target is loaded once"
