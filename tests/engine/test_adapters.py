"""LoRA adapters of a real server: loaded, replaced and taken out while it serves, and refused with a sentence.

The target is planted; weights of adapters are random and made here, so that one's greedy answer is not the target's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from outrider_crds.runtime_state import AdapterState
from safetensors.torch import load_file, save_file

from tests.engine.planted_models import Counting
from tests.engine.server_process import EXAMPLE, Server
from tests.engine.test_request_kinds import write_adapter

pytestmark = pytest.mark.model

TARGET_NAME = "smollm2-135m-instruct"
PROMPT = "Repeat: one two three four one two three four one two"


@dataclass(frozen=True)
class Adapted:
    """A server with room for adapters, its manifest, the folder that they are read from, and the target's."""

    server: Server
    manifest: Path
    folder: Path
    target: Path

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
        """Wait until these are loaded, and no other is wanted any more."""

        def adapters() -> list[tuple[str, bool]]:
            return [(adapter.name, adapter.loaded) for adapter in self.server.state().adapters]

        self.server.wait_until(f"adapters {names}", lambda: adapters() == [(name, True) for name in names])

    def reason(self, name: str) -> str:
        """The sentence about an adapter that cannot be loaded."""

        def reasons() -> list[str]:
            return [adapter.reason for adapter in self.server.state().adapters if adapter.name == name]

        self.server.wait_until(f"a reason of {name}", lambda: any(reasons()))
        return reasons()[0]

    def answer(self, model: str, tokens: int = 16) -> str:
        body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.server.post("/v1/completions", json.dumps(body).encode())
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        text: str = answer.json()["choices"][0]["text"]
        return text

    @contextmanager
    def streamed(self, model: str, tokens: int) -> Iterator[Iterator[str]]:
        """The pieces of an answer, as they come."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        with self.server.api.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            events = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
            yield (json.loads(event)["choices"][0]["text"] for event in events)

    def status(self, model: str) -> int:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
        return self.server.post("/v1/completions", json.dumps(body).encode()).status_code


@pytest.fixture(scope="module")
def adapted(models: Counting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapted")
    adapters = folder / "adapters"
    adapters.mkdir()
    for seed, name in enumerate(("one", "two"), 1):
        write_adapter(adapters / name, seed, target=models.target)
    document = yaml.safe_load(EXAMPLE.read_text())
    spec = document["spec"]
    spec["target"]["source"]["hostPath"]["path"] = str(models.target)
    spec["draftPool"] = [drafter for drafter in spec["draftPool"] if drafter["name"] == "lookup"]
    spec["speculation"]["mode"] = "Static"  # on a busy machine drafting may not pay
    spec["engine"]["lora"] = {"maxAdapters": 2, "maxRank": 8, "volume": {"hostPath": {"path": str(adapters)}}}
    spec["adapters"] = [{"name": "first", "source": {"folder": {"path": "one"}}}]
    manifest = folder / "service.yaml"
    manifest.write_text(yaml.safe_dump(document))
    server = Server(folder / "server.log", TARGET_NAME, "-f", str(manifest))
    try:
        server.wait_until("readiness", server.is_ready)
        yield Adapted(server, manifest, adapters, models.target)
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


def test_acceptance_and_slo_are_counted_by_adapter(adapted: Adapted) -> None:
    """One of two has traffic: state and scrape say whose proposals were accepted, and how its class fared."""
    server = adapted.server
    adapted.want(first="one", second="two")
    adapted.wait_for("first", "second")
    server.settled_state()
    before, idle = adapted.state("first"), adapted.state("second")
    adapted.answer("first", tokens=64)
    server.wait_until("the count", lambda: adapted.state("first").finished != before.finished)
    after = adapted.state("first")
    assert after.finished["interactive"] == before.finished.get("interactive", 0) + 1
    assert after.output_tokens == before.output_tokens + 64
    assert after.tried - before.tried >= after.accepted - before.accepted > 0
    assert adapted.state("second") == idle
    assert server.metric("outrider_adapter_accepted_total", adapter="first") == after.accepted
    assert server.metric("outrider_adapter_finished_total", adapter="first", slo_class="interactive") >= 1


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
    start, whole = adapted.answer("first"), adapted.answer("first", tokens=300)
    with adapted.streamed("first", tokens=300) as pieces:
        began = next(pieces)  # it runs, with the earlier weights
        adapted.want(first="two")
        adapted.server.wait_until("the other weights", lambda: adapted.answer("first") != start)
        assert began + "".join(pieces) == whole
    adapted.want(first="one")
    adapted.server.wait_until("the first weights", lambda: adapted.answer("first") == start)


def _changed(folder: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Write an adapter, each of whose weights `change` made."""
    write_adapter(folder, seed=3, target=target)
    weights = load_file(folder / "adapter_model.safetensors")
    changed = {name: change(name, weight).contiguous() for name, weight in weights.items()}
    save_file(changed, folder / "adapter_model.safetensors")


def _narrow(folder: Path, target: Path) -> None:
    """Half as wide: vLLM itself copies it into a corner of the target's tensors."""
    _changed(folder, target, lambda name, weight: weight[:, :64] if "q_proj.lora_A" in name else weight)


def _of_fewer_values(folder: Path, target: Path) -> None:
    """Fewer heads of keys and values, which vLLM keeps in one layer with the queries."""
    _changed(folder, target, lambda name, weight: weight[:64] if "v_proj.lora_B" in name else weight)


def _with_nan(folder: Path, target: Path) -> None:
    _changed(folder, target, lambda name, weight: weight * torch.nan if "1.self_attn.q_proj.lora_A" in name else weight)


def _of_high_rank(folder: Path, target: Path) -> None:
    write_adapter(folder, seed=3, rank=16, target=target)


def _with_other_modules(folder: Path, target: Path) -> None:
    write_adapter(folder, seed=3, target=target)
    weights = load_file(folder / "adapter_model.safetensors")
    other = {name.replace("q_proj", "wqkv"): weight for name, weight in weights.items()}
    save_file(other, folder / "adapter_model.safetensors")


def _cut_short(folder: Path, target: Path) -> None:
    write_adapter(folder, seed=3, target=target)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])


def _without_weights(folder: Path, target: Path) -> None:
    write_adapter(folder, seed=3, target=target)
    (folder / "adapter_model.safetensors").unlink()


MISFITS: dict[str, tuple[Any, str]] = {
    "another width": (_narrow, "layers.0.self_attn.q_proj takes 64 numbers and makes 128, the target's 128 and 128"),
    "fewer values": (_of_fewer_values, "layers.0.self_attn.v_proj takes 128 numbers and makes 64"),
    "NaN": (_with_nan, "its model.layers.1.self_attn.q_proj has lora_A with NaN"),
    "a higher rank": (_of_high_rank, "has rank 16, and engine.lora.maxRank is 8"),
    "other modules": (_with_other_modules, "wqkv"),
    "half a file": (_cut_short, ""),
    "no weights": (_without_weights, "there is no adapter_model.safetensors in misfit"),
    "no folder": (lambda _folder, _target: None, "there is no adapter_config.json in misfit"),
}


@pytest.mark.parametrize(("make", "said"), MISFITS.values(), ids=MISFITS)
def test_an_adapter_that_does_not_fit_is_refused_with_a_sentence(adapted: Adapted, make: Any, said: str) -> None:
    """What bad input gets: a sentence in the state, a 503 for its requests, and everything else goes on."""
    adapted.want(first="one")
    adapted.wait_for("first")
    first = adapted.answer("first")
    shutil.rmtree(adapted.folder / "misfit", ignore_errors=True)
    make(adapted.folder / "misfit", adapted.target)
    adapted.want(first="one", bad="misfit")
    reason = adapted.reason("bad")
    assert said in reason
    assert "\n" not in reason
    assert adapted.status("bad") == 503
    assert adapted.answer("first") == first
    assert adapted.server.is_ready()
    adapted.want(first="one")


def test_an_adapter_whose_files_come_later_is_loaded_then(adapted: Adapted) -> None:
    """A folder that is filled after the manifest was applied needs no second edit."""
    adapted.want(first="one", late="late")
    assert "there is no adapter_config.json in late" in adapted.reason("late")
    write_adapter(adapted.folder / "late", seed=4, target=adapted.target)
    adapted.wait_for("first", "late")
    assert adapted.state("late").reason == ""
    adapted.want(first="one")


def test_a_source_that_fails_leaves_the_earlier_one_serving(adapted: Adapted) -> None:
    """A mistake in an edit does not take an adapter out of service."""
    adapted.want(first="one")
    adapted.wait_for("first")
    first = adapted.answer("first")
    adapted.want(first="nowhere")
    assert "nowhere" in adapted.reason("first")
    assert adapted.state("first").loaded
    assert adapted.answer("first") == first
    adapted.want(first="one")
    adapted.server.wait_until("no reason", lambda: adapted.state("first").reason == "")


def test_a_model_field_of_another_type_is_a_bad_request(adapted: Adapted) -> None:
    """A list was compared with the names of adapters, which raised."""
    body = {"model": ["first"], "prompt": PROMPT, "max_tokens": 1}
    assert adapted.server.post("/v1/completions", json.dumps(body).encode()).status_code == 400
