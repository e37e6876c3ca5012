"""What changes under a running server: configuration, latency profile; and what its admin port says of it."""

from __future__ import annotations

import pytest
import yaml

from tests.engine.conftest import Laptop
from tests.engine.server_process import Server

pytestmark = pytest.mark.model


def _answer(server: Server) -> None:
    prompt = "Repeat: a b c d e f g a b c d e f g a b c d e f g"
    assert server.chat(prompt, max_tokens=40, temperature=0).status_code == 200


def test_speculation_is_switched_off_and_on_without_a_restart(laptop: Laptop) -> None:
    """`mode: Off` must not reload a model; the new config's hash is echoed."""
    server = laptop.server
    before = server.state()
    laptop.edit(mode="Off")
    server.wait_until("the new config", lambda: server.state().config_hash != before.config_hash)
    settled = server.state().speculative_steps
    _answer(server)
    off = server.settled_state()
    assert off.speculative_steps <= settled + 1  # a step that was already planned
    assert off.choice.reason == "Off"
    assert off.started_at == before.started_at
    laptop.edit(mode="ClosedLoop")
    server.wait_until("the old config", lambda: server.state().config_hash == before.config_hash)
    with laptop.speculating():
        _answer(server)
        server.wait_until("speculation", lambda: server.state().speculative_steps > off.speculative_steps)


def test_a_new_slo_class_is_known_at_once(laptop: Laptop) -> None:
    """SLO classes are hot; an unknown one is refused until then, with the known ones in the message."""
    server = laptop.server
    refused = server.chat(headers={"X-SLO-Class": "overnight"})
    assert refused.status_code == 400
    assert "known classes: interactive, batch" in refused.json()["error"]["message"]
    original = laptop.manifest.read_text()
    document = yaml.safe_load(original)
    document["spec"]["sloClasses"].append({"name": "overnight", "tpot": "10s"})
    laptop.manifest.write_text(yaml.safe_dump(document))
    served = {"X-SLO-Class": "overnight"}
    server.wait_until("the class", lambda: server.chat(headers=served, max_tokens=1).status_code == 200)
    laptop.manifest.write_text(original)
    server.wait_until("its end", lambda: server.chat(headers=served, max_tokens=1).status_code == 400)


def test_corrupt_latency_profile_is_reported_and_ignored(laptop: Laptop) -> None:
    """Issue 3: a corrupt latency-model file: keep the old one, say so in state and metrics."""
    server = laptop.server
    folder = laptop.profiles / "cpu"
    folder.mkdir()
    (folder / "target.json").write_text('{"schemaVersion": 1, "key": ')
    server.wait_until("the report", lambda: bool(server.state().profile.load_error))
    assert "target.json" in server.state().profile.load_error
    assert server.metric("outrider_profile_load_error") == 1
    _answer(server)
    assert server.is_ready()
    (folder / "target.json").unlink()
    server.wait_until("the all-clear", lambda: not server.state().profile.load_error)


def test_a_scrape_says_what_the_state_says(laptop: Laptop) -> None:
    """Both are one document; vLLM's own metrics are on the same page."""
    server = laptop.server
    _answer(server)
    state = server.settled_state()
    assert server.metric("outrider_output_tokens_total") == state.output_tokens
    assert server.metric("outrider_steps_total") == state.steps
    assert server.metric("outrider_speculative_steps_total") == state.speculative_steps
    for drafter in state.drafters:
        assert server.metric("outrider_drafter_accepted_total", drafter=drafter.name) == drafter.accepted
    assert server.metric("outrider_ready") == 1
    assert server.metric("vllm:generation_tokens_total") >= state.output_tokens


def test_last_decisions_are_shown_with_their_estimates(laptop: Laptop) -> None:
    """They cross from the engine's process to the server's as the state does."""
    server = laptop.server
    _answer(server)
    server.wait_until("a decision", lambda: "1 request: k = " in server.admin.get("/outrider/why").text)
    assert "a verified token costs" in server.admin.get("/outrider/why").text


def test_the_api_port_has_no_metrics_and_no_state(laptop: Laptop) -> None:
    """The Service exposes neither."""
    for path in ("/metrics", "/outrider/state", "/outrider/why", "/readyz"):
        assert laptop.server.api.get(path).status_code == 404
