"""The bundled engine as a server of its own, with the real model, in a process that cannot import vLLM."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.client_cases import BAD, MODEL, RECORDED
from tests.engine.server_process import EXAMPLE, PATIENCE_S, REPETITIVE, TARGET, Server

pytestmark = pytest.mark.model

WITHOUT_VLLM = "import sys\nsys.modules['vllm'] = None\n"
PROMPTS = ("The capital of France is", REPETITIVE, "def fibonacci(n):", "1, 2, 3, 4, 5, 6,")
TOKENS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("torch")
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["engine"] |= {"backend": "Torch", "dtype": "float32"}
    (folder / "service.yaml").write_text(yaml.safe_dump(document))
    (folder / "sitecustomize.py").write_text(WITHOUT_VLLM)
    started = Server(
        folder / "server.log", TARGET.name, "-f", str(folder / "service.yaml"), environment={"PYTHONPATH": str(folder)}
    )
    try:
        started.wait_until("readiness", started.is_ready)
        yield started
    finally:
        started.stop()


def completion(server: Server, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    answer = server.api.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_greedy_answers_with_a_pool_equal_transformers(server: Server) -> None:
    """Float32, prompt lookup and the EAGLE head under the loop; the state says that they drafted."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        expected = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        assert completion(server, prompt)["choices"][0]["text"] == expected
    server.wait_until("the state", lambda: server.state().output_tokens >= TOKENS * len(PROMPTS))
    state = server.state()
    assert state.plugin_active
    assert {drafter.name: drafter.loaded for drafter in state.drafters} == {"lookup": True, "eagle": True}
    assert server.metric("outrider_output_tokens_total") == state.output_tokens
    right = completion(server, REPETITIVE)["choices"][0]["text"]
    with speculating(server):
        assert completion(server, REPETITIVE)["choices"][0]["text"] == right
        server.wait_until("accepted drafts", lambda: any(drafter.accepted for drafter in server.state().drafters))
    state = server.state()
    assert state.speculative_steps > 0
    assert 0 < sum(drafter.accepted for drafter in state.drafters) <= sum(drafter.tried for drafter in state.drafters)


@contextmanager
def speculating(server: Server) -> Iterator[None]:
    """Draft at every step, whatever the loop decides: on a busy machine its probes may say that it does not pay."""
    manifest, before = server.log.with_name("service.yaml"), server.state().config_hash
    closed_loop = manifest.read_text()
    document = yaml.safe_load(closed_loop)
    document["spec"]["speculation"]["mode"] = "Static"
    manifest.write_text(yaml.safe_dump(document))
    server.wait_until("the new config", lambda: server.state().config_hash != before)
    yield
    manifest.write_text(closed_loop)
    server.wait_until("the old config", lambda: server.state().config_hash == before)


def test_a_seed_gives_the_same_answer_again(server: Server) -> None:
    """Answers do not depend on the drafter, or on the other requests of the batch."""
    fields = {"temperature": 0.8, "seed": 5}
    first = completion(server, REPETITIVE, **fields)["choices"][0]["text"]
    assert completion(server, [REPETITIVE, "Once"], **fields)["choices"][0]["text"] == first  # type: ignore[arg-type]
    assert completion(server, REPETITIVE, **{**fields, "seed": 6})["choices"][0]["text"] != first


@pytest.mark.parametrize("name", BAD)
def test_bad_request_gets_vllms_error_and_the_server_goes_on(server: Server, name: str) -> None:
    """A grammar is refused by its field, whatever is in it."""
    path, body = BAD[name]
    answer = server.post(path, body)
    assert [answer.status_code, answer.json()["error"]["type"]] == RECORDED[name], answer.text
    assert answer.json()["error"]["message"]
    assert server.probe("/livez") == 200


def test_a_request_counts_for_its_slo_class(server: Server) -> None:
    def finished() -> dict[str, int]:
        return {slo_class.name: slo_class.finished for slo_class in server.state().slo_classes}

    before = finished()["batch"]  # requests of the other tests are of the default class, and may be counted late
    assert server.chat(headers={"X-SLO-Class": "batch"}).status_code == 200
    assert server.chat(headers={"X-SLO-Class": "gold"}).status_code == 400
    server.wait_until("the count", lambda: finished()["batch"] == before + 1)


def test_running_requests_finish_before_the_server_ends(server: Server) -> None:
    """The last test of this server."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    with server.api.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        first = json.loads(next(line for line in lines if line).removeprefix("data: "))
        assert first["choices"][0]["text"]
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_unservable_settings_end_the_start_with_the_cause(tmp_path: Path) -> None:
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["engine"] |= {"backend": "Torch"}
    document["spec"]["target"]["source"]["hostPath"]["path"] = str(tmp_path / "mixture")
    shutil.copytree(TARGET, tmp_path / "mixture")
    config = tmp_path / "mixture" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_local_experts": 8}))
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(document))
    server = Server(tmp_path / "log", "mixture", "-f", str(tmp_path / "service.yaml"))
    try:
        assert server.process.wait(PATIENCE_S) == 1
        assert f"outrider-runtime: {config}: num_local_experts is 8" in server.last_lines(1)
    finally:
        server.stop()
