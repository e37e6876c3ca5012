"""A target over two nodes: two servers' processes, of which one serves and the other computes its share (gloo).

Both are on this machine; what a LeaderWorkerSet tells its pods is in their environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import yaml

from tests.engine.engines import SMALL_CACHE
from tests.engine.planted_models import even_heads_of_small
from tests.engine.server_process import PATIENCE_S, Server
from tests.ports import free_port

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

NODES, NEW_TOKENS = 2, 24
PROMPT = "one two three four one two three four one two"


def _manifest(folder: Path) -> Path:
    """A service over two nodes, with prompt lookup."""
    document = {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": "nodes"},
        "spec": {
            "target": {"name": "target", "source": {"hostPath": {"path": str(folder / "target")}}},
            "draftPool": [{"name": "lookup", "method": "PromptLookup", "promptLookup": {"minTokens": 1}}],
            "accelerator": {"products": ["cpu"]},
            "speculation": {"mode": "Static"},
            "engine": {
                "nodes": NODES,
                "tensorParallelSize": NODES,
                "dtype": "float32",
                "maxModelLen": 256,
                "extraArgs": ["--max-num-seqs=4", "--max-num-batched-tokens=256", "--enforce-eager", SMALL_CACHE],
            },
        },
    }
    manifest = folder / "nodes.yaml"
    manifest.write_text(yaml.safe_dump(document))
    return manifest


class TwoNodes:
    def __init__(self, folder: Path) -> None:
        self.target = even_heads_of_small(folder / "target")
        manifest, port = _manifest(folder), free_port()
        meeting = {"LWS_LEADER_ADDRESS": "127.0.0.1", "MASTER_PORT": str(port), "VLLM_HOST_IP": "127.0.0.1"}
        self.leader = Server(
            folder / "leader.log", "target", "-f", str(manifest), environment={**meeting, "LWS_WORKER_INDEX": "0"}
        )
        command = [sys.executable, "-m", "outrider_runtime.server.main", "serve", "-f", str(manifest)]
        self.log = folder / "worker.log"
        with self.log.open("w") as output:
            self.worker = subprocess.Popen(
                [*command, "--admin-port", str(self.leader.admin_port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **meeting, "LWS_WORKER_INDEX": "1"},
                start_new_session=True,
            )

    def answer(self) -> str:
        body = {"model": "target", "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0}
        response = self.leader.api.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def stop(self) -> None:
        self.leader.stop()
        if self.worker.poll() is None:
            os.killpg(self.worker.pid, signal.SIGKILL)
        self.worker.wait()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Generator[TwoNodes]:
    started = TwoNodes(tmp_path_factory.mktemp("nodes"))
    try:
        started.leader.wait_until("both nodes", started.leader.is_ready)
        yield started
    finally:
        print(started.log.read_text()[-4000:])
        started.stop()


def _greedy(target: Path) -> str:
    """What the target says by itself, in one process and without drafts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target)
    tokens = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        made = model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False)
    text: str = tokenizer.decode(made[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_two_nodes_answer_as_the_target_does(nodes: TwoNodes) -> None:
    """The loop runs where the scheduler does; every rank verifies what it orders."""
    assert nodes.answer() == _greedy(nodes.target)
    (lookup,) = nodes.leader.settled_state().drafters
    assert (lookup.name, lookup.loaded) == ("lookup", True)
    assert lookup.tried > 0


def test_a_worker_ends_with_its_leader(nodes: TwoNodes) -> None:
    """Comes last. Kubernetes ends a whole group at once, and the leader drains."""
    nodes.worker.terminate()
    assert nodes.answer()
    assert nodes.worker.poll() is None
    nodes.leader.stop()
    assert nodes.worker.wait(PATIENCE_S) == 128 + signal.SIGTERM
