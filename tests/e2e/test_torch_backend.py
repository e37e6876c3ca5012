"""A manifest with `engine.backend: Torch` on a real cluster: profiled, Ready, and its draft pool rolls out."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.e2e.conftest import EXAMPLE, PATIENCE_S, TORCH_NAME, Service

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(2 * PATIENCE_S)]


def test_a_profiled_service_answers(torch_service: Service) -> None:
    """`profiling.mode: Required`: that it is up says that its profile was there first."""
    profile = torch_service.follower.look()["status"]["profiles"][0]
    stored = torch_service.cluster.get("configmap", profile["configMap"])["data"]
    assert json.loads(stored["target.json"])["engineVersion"].startswith("torch-")
    assert {json.loads(text)["name"] for key, text in stored.items() if key != "target.json"} == {"lookup"}
    _answers(torch_service)


def test_a_patched_pool_rolls_out(torch_service: Service) -> None:
    """Only the new drafter is measured; new pods host it."""
    pool = yaml.safe_load(EXAMPLE.read_text())["spec"]["draftPool"]
    torch_service.patch(json.dumps({"spec": {"draftPool": pool}}))
    seen = torch_service.until_updated()
    assert {entry["name"]: entry["loaded"] for entry in seen["status"]["drafts"]} == {"lookup": True, "eagle": True}
    _answers(torch_service)
    torch_service.cluster.kubectl("delete", "specsvc", TORCH_NAME, "--wait")


def _answers(service: Service) -> None:
    with service.load(concurrency=1) as load:
        service.cluster.wait_until("an answer", lambda: bool(load.answers), timeout_s=PATIENCE_S)
    assert load.errors == []
