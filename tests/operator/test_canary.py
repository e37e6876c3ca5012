"""A patched draft proves itself in a canary pod on a real cluster, with the stand-in runtime."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from outrider_operator.kinds import DEPLOYMENT

from tests.operator.client import Service, uids, wait_for
from tests.operator.conftest import Make
from tests.operator.manifests import LOOKUP
from tests.operator.process import OperatorProcess

pytestmark = pytest.mark.cluster


def head(name: str) -> dict[str, Any]:
    """A drafter of a model of its own."""
    model = {"name": f"tests/{name}", "source": {"hostPath": {"path": "/srv"}}}
    return {"name": name, "method": "Eagle", "eagle": {"model": model}}


GOOD, BAD = head("good"), head("bad")
CANARY: dict[str, Any] = {
    "strategy": "DraftCanary", "maxSurge": 1, "drainTimeout": "1s", "progressDeadline": "300s",
    "canary": {"minRequests": 20},
}  # fmt: skip


@pytest.fixture(scope="module")
def services(make: Make) -> dict[str, Service]:
    """Started together."""
    busy: dict[str, Any] = {"worse": "bad", "tokens_per_s": 100}
    common: dict[str, Any] = {"profiling": {"mode": "Skip"}, "rollout": CANARY}
    return {
        "bad": make("bad", replicas=2, standin=busy, **common),
        "good": make("good", replicas=2, standin=busy, **common),
        "slow": make("slow", replicas=1, standin=busy | {"canary_requests_per_s": 0.5}, **common),
    }


@pytest.fixture
def operator_restarted(operator_process: OperatorProcess) -> Generator[OperatorProcess]:
    """A test that kills the operator leaves it running."""
    yield operator_process
    if not operator_process.running():
        operator_process.start()


def test_a_bad_draft_is_taken_back_and_the_old_pods_are_never_touched(services: dict[str, Service]) -> None:
    service = services["bad"]
    service.wait_updated()
    before, revision = uids(service.ready_pods()), service.revision
    service.patch({"draftPool": [LOOKUP, BAD]})
    wait_for("a canary pod", lambda: len(canary_pods(service)) == 1)
    progressing = service.wait("Progressing", "False", "CanaryFailed")
    rollout = service.read()["status"]["rollout"]
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
    rollout = service.read()["status"]["rollout"]
    assert (rollout["phase"], rollout["stable"], rollout["candidate"]) == ("Successful", revision, service.revision)
    assert service.revision != revision
    wait_for("the canary to go", lambda: not canary_pods(service) and not has_canary(service))


def test_an_operator_that_is_killed_goes_on(services: dict[str, Service], operator_restarted: OperatorProcess) -> None:
    """It is killed while the canary waits for requests; the pod and its attempt stay the same."""
    service = services["slow"]
    service.wait_updated()
    service.patch({"draftPool": [LOOKUP, GOOD]})
    service.wait("Progressing", "True", "CanaryMeasuring")
    before, started = uids(canary_pods(service)), rollout_of(service)["startedAt"]
    operator_restarted.kill()
    operator_restarted.start()
    service.annotate(abort="nonsense")
    wait_for("the operator to be back", lambda: rollout_of(service).get("ignored"))
    assert uids(canary_pods(service)) == before
    service.annotate(promote=rollout_of(service)["candidate"])
    service.wait_updated()
    rollout = service.read()["status"]["rollout"]
    assert (rollout["phase"], rollout["startedAt"]) == ("Successful", started)


def rollout_of(service: Service) -> dict[str, Any]:
    rollout: dict[str, Any] = service.read()["status"].get("rollout", {})
    return rollout


def canary_pods(service: Service) -> list[dict[str, Any]]:
    return [pod for pod in service.pods() if pod["metadata"]["labels"].get("outrider.dev/track") == "canary"]


def has_canary(service: Service) -> bool:
    return service.client.get(DEPLOYMENT, service.namespace, f"{service.name}-canary") is not None
