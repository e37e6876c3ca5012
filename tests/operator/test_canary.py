"""A patched draft proves itself in a canary pod on a real cluster, with the stand-in runtime."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.canaries import (
    BAD,
    BUSY,
    COMMON,
    GOOD,
    canary_pods,
    rollout_of,
    wait_over,
    wait_phase,
)
from tests.operator.client import Service, uids, wait_for
from tests.operator.conftest import Make
from tests.operator.manifests import LOOKUP, on_gpu

pytestmark = pytest.mark.cluster

H200, L4 = "NVIDIA-H200", "NVIDIA-L4"
EACH_PRODUCT = {
    "maxSkew": 1,
    "topologyKey": "nvidia.com/gpu.product",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"outrider.dev/service": "products"}},
    "matchLabelKeys": ["pod-template-hash"],
}


@pytest.fixture(scope="module")
def services(make: Make) -> dict[str, Service]:
    """Started together."""
    spread = {"podTemplate": {"topologySpreadConstraints": [EACH_PRODUCT]}}
    return {
        "bad": make("bad", replicas=2, standin=BUSY, **COMMON),
        "good": make("good", replicas=2, standin=BUSY, **COMMON),
        "raises": make("raises", replicas=1, standin=BUSY | {"canary_failures": 2}, **COMMON),
        "products": make("products", replicas=2, standin=BUSY, **on_gpu([H200, L4]), **spread, **COMMON),
    }


def test_a_bad_draft_is_taken_back_and_the_old_pods_are_never_touched(services: dict[str, Service]) -> None:
    service = services["bad"]
    service.wait_updated()
    before, revision = uids(service.ready_pods()), service.revision
    service.patch({"draftPool": [LOOKUP, BAD]})
    wait_for("a canary pod", lambda: len(canary_pods(service)) == 1)
    progressing = service.wait("Progressing", "False", "CanaryFailed")
    rollout = rollout_of(service)
    assert (rollout["phase"], rollout["cause"], rollout["stable"]) == ("Failed", "Worse", revision)
    assert rollout["summary"].startswith("Failed ")
    assert "Gain -30.0% [" in progressing["message"]
    assert service.condition("Updated")["reason"] == "CanaryFailed"
    wait_for("the canary pod to go", lambda: not canary_pods(service))
    assert uids(service.ready_pods()) == before
    assert service.revision == revision
    assert service.read()["status"]["replicas"] == 2


def test_a_good_draft_is_promoted(services: dict[str, Service]) -> None:
    service = services["good"]
    service.wait_updated()
    revision = service.revision
    service.patch({"draftPool": [LOOKUP, GOOD]})
    service.wait("Progressing", "False", "Complete")
    service.wait_updated()
    rollout = rollout_of(service)
    assert (rollout["phase"], rollout["stable"], rollout["candidate"]) == ("Successful", revision, service.revision)
    assert service.revision != revision
    wait_over(service)


def test_each_product_in_use_is_measured(services: dict[str, Service]) -> None:
    """A pod on each, whatever the scheduler prefers; the promotion needs both."""
    service = services["products"]
    service.wait_updated()
    service.patch({"draftPool": [LOOKUP, GOOD]})
    pods = wait_for("two canary pods with nodes", lambda: _on_nodes(service, 2))
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    service.wait_updated()
    rollout = rollout_of(service)
    assert rollout["phase"] == "Successful"
    measured = {entry["product"]: entry["requests"] >= 20 for entry in rollout["products"]}
    assert measured == {H200: True, L4: True}


@pytest.mark.parametrize(("name", "cause"), [("raises", "DrafterFailed")])
def test_draft_that_fails_after_it_has_loaded_is_taken_back(
    services: dict[str, Service], name: str, cause: str
) -> None:
    """It raises, and is suspended twice. Other pods are not touched."""
    service = services[name]
    service.wait_updated()
    before, revision = uids(service.ready_pods()), service.revision
    service.patch({"draftPool": [LOOKUP, GOOD]})
    wait_phase(service, "Failed", cause)
    wait_for("the canary pod to go", lambda: not canary_pods(service))
    assert (service.revision, uids(service.ready_pods())) == (revision, before)


def _on_nodes(service: Service, number: int) -> list[dict[str, Any]]:
    """The canary's pods, once so many have a node."""
    pods = [pod for pod in canary_pods(service) if pod["spec"].get("nodeName")]
    return pods if len(pods) == number else []
