"""vLLM's own command line with OUTRIDER set: it speculates, says so, and answers as it does alone.

Three servers: with Outrider, alone, and one in whose engine Outrider cannot start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.client_cases import BAD, GOOD, MODEL
from tests.engine.engines import EAGLE_HEAD
from tests.engine.server_process import REPETITIVE
from tests.engine.stock_cli import StockServer

pytestmark = pytest.mark.model

LOOKUP = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
PROMPTS = (REPETITIVE, "Count to ten.", "def add(a, b):\n    return a + b\n\ndef add(a, b):")


def pool(*names: str, mode: str = "Static") -> str:
    """The text of a file for OUTRIDER_CONFIG, with EAGLE heads of these names and a lookup."""
    head = {"name": "head", "source": {"hostPath": {"path": str(EAGLE_HEAD)}}}
    drafters: list[dict[str, Any]] = [{"name": "words", "method": "PromptLookup", "promptLookup": {"minTokens": 2}}]
    drafters += [{"name": name, "method": "Eagle", "eagle": {"model": head}} for name in names]
    classes = [{"name": "interactive", "tpot": "50ms"}, {"name": "batch", "tpot": "500ms"}]
    speculation = {"maxDraftTokens": 3, "mode": mode}
    return yaml.safe_dump({"draftPool": drafters, "sloClasses": classes, "speculation": speculation})


@contextmanager
def started(folder: Path, *flags: str, **environment: str) -> Iterator[StockServer]:
    server = StockServer(folder, *flags, environment=environment)
    try:
        server.wait_until("the API", server.is_listening)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "outrider.yaml"
    file.write_text(pool("eagle"))
    return file


@pytest.fixture(scope="module")
def active(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Iterator[StockServer]:
    with started(tmp_path_factory.mktemp("active"), OUTRIDER="1", OUTRIDER_CONFIG=str(config)) as server:
        yield server


@pytest.fixture(scope="module")
def alone_answers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with started(tmp_path_factory.mktemp("alone")) as server:
        assert "outrider" not in server.page("/metrics")
        assert server.api.get("/outrider/state").status_code == 404
        return [answer(server, prompt) for prompt in PROMPTS]


def answer(server: StockServer, prompt: str) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0, "logprobs": 0}
    choice = server.post("/v1/completions", json.dumps(body).encode()).json()["choices"][0]
    return json.dumps([choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]])


def test_answers_with_outrider_equal_those_of_vllm_alone(active: StockServer, alone_answers: list[str]) -> None:
    assert [answer(active, prompt) for prompt in PROMPTS] == alone_answers
    active.wait_until("the counts", lambda: active.metric("outrider_speculative_steps_total") > 0)
    assert active.metric("outrider_drafter_accepted_total") > 0


def test_stock_server_has_outriders_pages_and_metrics(active: StockServer) -> None:
    assert active.metric("outrider_active", reason="") == 1
    assert active.metric("vllm:num_requests_running") == 0
    active.wait_until("a report", lambda: active.metric("outrider_plugin_active") == 1)
    state = active.state()
    assert {drafter.name: drafter.loaded for drafter in state.drafters} == {"words": True, "eagle": True}
    assert [slo.name for slo in state.slo_classes] == ["interactive", "batch"]
    active.chat(REPETITIVE)
    active.wait_until("a decision", lambda: "k = " in active.page("/outrider/why"))


def test_header_of_the_stock_server_chooses_the_class(active: StockServer) -> None:
    def finished(name: str) -> float:
        return active.metric("outrider_slo_class_finished_total", slo_class=name)

    before = finished("batch")
    assert active.chat(headers={"X-SLO-Class": "batch"}).status_code == 200
    active.wait_until("the count", lambda: finished("batch") == before + 1)
    assert active.chat(headers={"X-SLO-Class": "gold"}).status_code == 400


@pytest.mark.parametrize("name", BAD)
def test_bad_request_ends_neither_server_nor_loop(active: StockServer, name: str) -> None:
    """The status is vLLM's own business; some of these are 500 there."""
    active.post(*BAD[name])
    assert active.chat().status_code == 200
    assert active.metric("outrider_loop_failures_total") == 0


@pytest.mark.parametrize("name", GOOD)
def test_what_clients_send_to_vllms_server_is_served(active: StockServer, name: str) -> None:
    GOOD[name](active)
    assert active.metric("outrider_loop_failures_total") == 0


def test_edit_of_the_file_takes_effect_without_restart(active: StockServer, config: Path) -> None:
    before = active.state().config_hash
    config.write_text(pool("eagle", mode="ClosedLoop"))
    active.wait_until("the new config", lambda: active.state().config_hash != before)
    changed = active.state().config_hash
    config.write_text(pool(mode="Bad"))
    active.wait_until("the refusal", lambda: "the changed manifest is not used" in active.last_lines())
    assert active.state().config_hash == changed


def test_vllm_serves_alone_if_outrider_cannot_start(
    tmp_path: Path, alone_answers: list[str]
) -> None:  # fmt: skip
    """Whatever raises in the engine's processes, the user's own flags serve."""
    fault = tmp_path / "fault"
    fault.mkdir()
    fault.joinpath("sitecustomize.py").write_text(
        "import sys\nsys.modules['outrider_runtime.vllm_plugin.scheduler'] = None\n"
    )
    flags = f"--speculative-config={LOOKUP}"
    with started(tmp_path, flags, OUTRIDER="1", PYTHONPATH=str(fault)) as server:
        assert [answer(server, prompt) for prompt in PROMPTS] == alone_answers
        assert server.metric("outrider_active") == 0
        assert "outrider_runtime.vllm_plugin.scheduler" in server.page("/metrics")
        assert server.api.get("/outrider/state").status_code == 503
        assert server.metric("vllm:spec_decode_num_drafts_total") > 0
        assert "Outrider is not active, and vLLM serves with its own flags alone" in server.log.read_text()
