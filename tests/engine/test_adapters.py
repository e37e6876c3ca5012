"""LoRA adapters of a real server: loaded, replaced and taken out while it serves, and refused with a sentence.

Their weights are random and made here, so an adapter's greedy answer differs from the target's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from outrider_crds.runtime_state import AdapterState

from tests.engine.server_process import EXAMPLE, Server
from tests.engine.test_what_serving_must_not_lose import write_adapter

pytestmark = pytest.mark.model

TARGET_NAME = "smollm2-135m-instruct"
PROMPT = "Repeat: one two three four one two three four one two"


@dataclass(frozen=True)
class Adapted:
    """A server with room for adapters, its manifest, and the folder that they are read from."""

    server: Server
    manifest: Path
    folder: Path

    def want(self, **folders: str) -> None:
        """Write `spec.adapters`: name=folder."""
        document = yaml.safe_load(self.manifest.read_text())
        document["spec"]["adapters"] = [
            {"name": name, "source": {"folder": {"path": path}}} for name, path in folders.items()
        ]
        self.manifest.write_text(yaml.safe_dump(document))

    def state(self, name: str) -> AdapterState:
        (state,) = [adapter for adapter in self.server.state().adapters if adapter.name == name]
        return state

    def wait_for(self, *names: str) -> None:
        def loaded() -> list[str]:
            return [adapter.name for adapter in self.server.state().adapters if adapter.loaded]

        self.server.wait_until(f"adapters {names}", lambda: loaded() == list(names))

    def answer(self, model: str, tokens: int = 16) -> str:
        body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.server.post("/v1/completions", json.dumps(body).encode())
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        text: str = answer.json()["choices"][0]["text"]
        return text

    def status(self, model: str) -> int:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
        return self.server.post("/v1/completions", json.dumps(body).encode()).status_code


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapted")
    adapters = folder / "adapters"
    adapters.mkdir()
    for seed, name in enumerate(("one", "two"), 1):
        write_adapter(adapters / name, seed=seed)
    document = yaml.safe_load(EXAMPLE.read_text())
    spec = document["spec"]
    spec["draftPool"] = [drafter for drafter in spec["draftPool"] if drafter["name"] == "lookup"]
    spec["engine"]["lora"] = {"maxAdapters": 2, "maxRank": 8, "volume": {"hostPath": {"path": str(adapters)}}}
    spec["adapters"] = [{"name": "first", "source": {"folder": {"path": "one"}}}]
    manifest = folder / "service.yaml"
    manifest.write_text(yaml.safe_dump(document))
    server = Server(folder / "server.log", TARGET_NAME, "-f", str(manifest))
    try:
        server.wait_until("readiness", server.is_ready)
        yield Adapted(server, manifest, adapters)
    finally:
        server.stop()


def test_an_adapter_of_the_start_is_served_when_ready(adapted: Adapted) -> None:
    """A pod that is ready answers for each adapter of its manifest: a rollout costs no adapter its requests."""
    assert adapted.state("first").loaded
    assert adapted.answer("first") != adapted.answer(TARGET_NAME)


def test_an_adapter_comes_and_goes_without_a_restart(adapted: Adapted) -> None:
    """spec.adapters is hot: the process stays, /v1/models lists what is loaded, and the target goes on."""
    server, plain, first = adapted.server, adapted.answer(TARGET_NAME), adapted.answer("first")
    started_at = server.state().started_at
    adapted.want(first="one", second="two")
    adapted.wait_for("first", "second")
    second = adapted.answer("second")
    assert len({plain, first, second}) == 3
    listed = {model["id"] for model in server.api.get("/v1/models").json()["data"]}
    assert listed == {TARGET_NAME, "first", "second"}
    assert server.metric("outrider_adapter_loaded", adapter="second") == 1
    adapted.want(first="one")
    server.wait_until("the end of the second", lambda: adapted.status("second") == 404)
    assert (adapted.answer(TARGET_NAME), adapted.answer("first")) == (plain, first)
    assert server.state().started_at == started_at


def test_another_source_replaces_weights_and_their_cached_kv(adapted: Adapted) -> None:
    """A name that gets other weights answers as they do, although the prompt's KV of the earlier ones is cached."""
    adapted.want(first="one", second="two")
    adapted.wait_for("first", "second")
    second = adapted.answer("second")
    adapted.want(first="two", second="two")
    adapted.server.wait_until("the other weights", lambda: adapted.answer("first") == second)
    adapted.want(first="one")
    adapted.server.wait_until("the first weights", lambda: adapted.answer("first") != second)


def test_running_requests_keep_the_weights_they_began_with(adapted: Adapted) -> None:
    """Earlier weights stay until their last request has ended, and new requests run with the new ones meanwhile."""
    adapted.want(first="one")
    adapted.wait_for("first")
    whole = adapted.answer("first", tokens=400)
    answers: list[str] = []
    request = threading.Thread(target=lambda: answers.append(adapted.answer("first", tokens=400)))
    request.start()
    adapted.want(first="two")
    adapted.server.wait_until("the other weights", lambda: adapted.answer("first") != whole[: len(whole) // 25])
    request.join()
    assert answers == [whole]
    adapted.want(first="one")
    adapted.server.wait_until("the first weights", lambda: adapted.answer("first", tokens=400) == whole)
