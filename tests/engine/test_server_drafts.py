"""A drafter that looks right and cannot be loaded."""

from __future__ import annotations

import pytest

from tests.engine.conftest import BROKEN, Laptop
from tests.engine.server_process import REPETITIVE

pytestmark = pytest.mark.model


def test_a_drafter_that_cannot_load_is_dropped_and_named(laptop: Laptop) -> None:
    """The pod drops it, serves on, and names it; it does not crash in a loop."""
    server = laptop.server
    lookup, eagle, broken = server.state().drafters
    assert lookup.loaded
    assert eagle.loaded
    assert not broken.loaded
    assert "damaged or cut off" in broken.reason
    before = lookup.verified
    with laptop.speculating():
        assert server.chat(REPETITIVE, max_tokens=48, temperature=0).status_code == 200
        state = server.settled_state()
    assert state.plugin_active
    assert state.drafters[0].verified > before, "what is left of the pool is used"
    assert server.metric("outrider_drafter_loaded", drafter=BROKEN) == 0
    log = server.log.read_text(errors="replace")
    assert f"drafter '{BROKEN}' is not used" in log
    assert "starting again" not in log, "the target is loaded once"
