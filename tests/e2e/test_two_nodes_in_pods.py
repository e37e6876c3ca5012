"""A target over two pods of the real runtime, which a LeaderWorkerSet makes: one manifest, one answer."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from demo.service import is_true
from setup.model import build_model_once
from setup.steps import CACHE
from tests.cluster.cluster import Cluster
from tests.e2e.conftest import PATIENCE_S, Service
from tests.e2e.name_server import NameServer
from tests.engine.engines import SMALL_CACHE
from tests.engine.planted_models import even_heads_of_small
from tests.operator.leader_worker_sets import LeaderWorkerSets

pytestmark = [pytest.mark.cluster, pytest.mark.model]

NAME = "over-nodes"
TARGET = CACHE / "models" / "smollm2-135m-even-heads"


def _manifest(names: str) -> dict[str, Any]:
    """names: address of the name server, which a cluster with DNS has by itself."""
    return {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": NAME},
        "spec": {
            "target": {"name": NAME, "source": {"hostPath": {"path": f"/srv/models/{TARGET.name}"}}},
            "draftPool": [{"name": "lookup", "method": "PromptLookup", "promptLookup": {"minTokens": 1}}],
            "accelerator": {"products": ["cpu"]},
            "speculation": {"mode": "Static"},
            "engine": {
                "nodes": 2,
                "tensorParallelSize": 2,
                "dtype": "float32",
                "maxModelLen": 256,
                "extraArgs": ["--max-num-seqs=4", "--max-num-batched-tokens=256", "--enforce-eager", SMALL_CACHE],
                "env": [{"name": "KMP_BLOCKTIME", "value": "0"}],
            },
            "podTemplate": {
                "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}},
                "dnsPolicy": "None",
                "dnsConfig": {"nameservers": [names]},
            },
        },
    }


@pytest.fixture(scope="module")
def group(installed: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    """A service that answers."""
    build_model_once(TARGET, even_heads_of_small)
    folder: Path = tmp_path_factory.mktemp("lws")
    with NameServer(installed), LeaderWorkerSets(installed, "default", folder):
        manifest = yaml.safe_dump(_manifest(installed.machine_address))
        installed.kubectl("apply", "-f", "-", stdin=manifest)
        service = Service(installed, NAME)
        service.follower.follow_until(
            lambda document: is_true(document, "Ready", "Updated"), timeout_s=PATIENCE_S, what="a group that answers"
        )
        yield service
        installed.kubectl("delete", "specsvc", NAME)


def test_two_pods_answer_as_one(group: Service) -> None:
    """The Service leads to the leader; both pods run, and the state of the loop is the leader's."""
    body = {"model": NAME, "prompt": "one two three four one two three", "max_tokens": 16, "temperature": 0}
    answers = [httpx.post(f"{group.url}/v1/completions", json=body, timeout=PATIENCE_S) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    first, second = (answer.json()["choices"][0]["text"] for answer in answers)
    assert first == second
    assert first.strip()
    (leader,) = group.pods()
    assert leader["metadata"]["name"] == f"{NAME}-nodes-0"
    workers = group.cluster.get("pods", selector=f"outrider.dev/service={NAME},outrider.dev/component=serving-worker")
    assert [worker["status"]["phase"] for worker in workers] == ["Running"]
    status = group.cluster.get("specsvc", NAME)["status"]
    assert (status["nodes"], status["readyReplicas"]) == (2, 1)
    assert [draft["loaded"] for draft in status["drafts"]] == [True]
