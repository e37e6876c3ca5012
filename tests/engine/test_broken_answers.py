"""NaN and infinity that a real server computes: from an adapter that overflows, and from a target's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.planted_models import Counting
from tests.engine.server_process import Server, boot_document, write_json
from tests.engine.test_adapters import TARGET_NAME, Adapted, adapted  # noqa: F401 (a fixture)
from tests.engine.test_request_kinds import write_adapter
from tests.engine.test_server_stops import HOT

pytestmark = pytest.mark.model


def with_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "adapter_model.safetensors"
    file = file if file.exists() else folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


def overflow(weights: dict[str, torch.Tensor]) -> None:
    """Make products of finite weights infinite."""
    for name in weights:
        if "q_proj" in name or "v_proj" in name:
            weights[name] = torch.full_like(weights[name], 1e30)


def test_adapter_that_overflows_spoils_no_other_answer(adapted: Adapted) -> None:  # noqa: F811
    """Bug: one request of such an adapter left NaN in its KV pages, and made every later answer empty: the target's
    and other adapters', while the pod was ready. A shorter prompt leaves more of a page as it was."""

    def short(model: str) -> str:
        body = {"model": model, "prompt": "One", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = adapted.server.api.post("/v1/completions", json=body)
        assert answer.status_code == 200
        text: str = answer.json()["choices"][0]["text"]
        return text

    def answers() -> list[str]:
        return [answer(model) for answer in (short, adapted.answer) for model in (TARGET_NAME, "first")]

    adapted.want(first="one")
    adapted.wait_for("first")
    expected = answers()
    write_adapter(adapted.folder / "large", seed=5, target=adapted.target)
    with_weights(adapted.folder / "large", overflow)
    adapted.want(first="one", large="large")
    adapted.wait_for("first", "large")
    for _ in range(4):
        assert adapted.status("large") == 500
    adapted.server.settled_state()
    assert adapted.server.metric("outrider_broken_answers_total") == 4
    assert adapted.server.is_ready()
    for _ in range(3):
        assert answers() == expected
    assert adapted.server.metric("outrider_broken_answers_total") == 4


@pytest.fixture
def target(models: Counting, tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    for file in models.target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def serve(target: Path) -> Server:
    folder = target.parent
    boot = write_json(folder / "boot.json", boot_document(target, extra_arguments=[]))
    hot = write_json(folder / "hot.json", HOT)
    return Server(folder / "server.log", str(target), "--config", str(boot), "--hot-config", str(hot))


def test_target_with_nan_is_refused_at_the_start(target: Path) -> None:
    def break_one(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"][3] = torch.nan

    with_weights(target, break_one)
    server = serve(target)
    assert server.process.wait(600) != 0
    assert "the target cannot be served: its model.norm.weight has NaN" in server.last_lines(1)


def test_pod_whose_answers_are_all_broken_restarts(target: Path) -> None:
    """Its weights are finite, and what it computes is not: each request fails, and the third ends the process."""

    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"].fill_(3e38)

    with_weights(target, enlarge)
    server = serve(target)
    try:
        server.wait_until("readiness", server.is_ready)
        assert [server.chat(f"Count {number}").status_code for number in range(3)] == [500] * 3
        assert server.process.wait(60) != 0
    finally:
        server.stop()
    assert "the last 3 requests had no finite hidden state" in server.last_lines(1)
