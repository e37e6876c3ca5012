"""A patched draft proves itself in a canary pod on a real cluster, with the stand-in runtime."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.canaries import (
    BAD,
    BUSY,
    CANARY,
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
SHORT = "the pool does not fit into memory: 20 MiB are left for KV; good takes 900 MiB"
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
    silent = COMMON | {"rollout": CANARY | {"canary": {"timeout": "1m"}}}
    spread = {"podTemplate": {"topologySpreadConstraints": [EACH_PRODUCT]}}
    return {
        "bad": make("bad", replicas=2, standin=BUSY, **COMMON),
        "good": make("good", replicas=2, standin=BUSY, **COMMON),
        "idle": make("idle", replicas=1, **silent),
        "old": make("old", replicas=1, standin=BUSY | {"without_canary": 1}, **COMMON),
        "raises": make("raises", replicas=1, standin=BUSY | {"canary_failures": 2}, **COMMON),
        "fatal": make("fatal", replicas=1, standin=BUSY | {"fatal": "good", "canary_requests_per_s": 1}, **COMMON),
        "short": make("short", replicas=1, standin=BUSY | {"unloadable": "good", "unloadable_reason": SHORT}, **COMMON),
        "products": make("products", replicas=2, standin=BUSY, **on_gpu([H200, L4]), **spread, **COMMON),
    }


@pytest.fixture(scope="module", autouse=True)
def before(services: dict[str, Service]) -> dict[str, tuple[str, set[str]]]:
    """Revision and ready pods of services that get a draft at once, so that their canaries wait side by side."""
    noted = {}
    for name in ("idle", "old", "short", "raises", "fatal"):
        service = services[name]
        service.wait_updated()
        noted[name] = service.revision, uids(service.ready_pods())
        service.patch({"draftPool": [LOOKUP, GOOD]})
    return noted


def test_bad_draft_is_taken_back_without_touching_old_pods(services: dict[str, Service]) -> None:
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


def test_what_cannot_be_measured_is_neither_failure_nor_success(
    services: dict[str, Service], before: dict[str, tuple[str, set[str]]]
) -> None:
    """A service without traffic, a runtime that knows no canary, and a pod without memory for both pools."""
    idle, old, short = services["idle"], services["old"], services["short"]
    wait_phase(short, "Error", "NoRoomForBoth")
    assert SHORT.split(";")[1].strip() in short.wait("Progressing", "False", "CanaryError")["message"]
    wait_phase(idle, "Inconclusive", "NoTraffic")
    assert len(canary_pods(idle)) == 1
    wait_phase(old, "Error", "RuntimeTooOld")
    for service in (idle, old, short):
        revision, pods = before[service.name]
        assert service.revision == revision
        assert uids(service.ready_pods()) - uids(canary_pods(service)) == pods
    idle.annotate(abort=rollout_of(idle)["candidate"])
    wait_phase(idle, "Failed", "AbortedByHand")
    wait_for("the canary pod to go", lambda: not canary_pods(idle))


@pytest.mark.parametrize(("name", "cause"), [("raises", "DrafterFailed"), ("fatal", "CandidateCrashed")])
def test_draft_that_fails_after_it_has_loaded_is_taken_back(
    services: dict[str, Service], before: dict[str, tuple[str, set[str]]], name: str, cause: str
) -> None:
    """One raises, and its drafter is suspended twice; the other takes all of the pod's memory, twice. Other pods are
    not touched."""
    service = services[name]
    wait_phase(service, "Failed", cause)
    wait_for("the canary pod to go", lambda: not canary_pods(service))
    assert (service.revision, uids(service.ready_pods())) == before[name]


def _on_nodes(service: Service, number: int) -> list[dict[str, Any]]:
    """The canary's pods, once so many have a node."""
    pods = [pod for pod in canary_pods(service) if pod["spec"].get("nodeName")]
    return pods if len(pods) == number else []
