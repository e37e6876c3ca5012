"""A draft canary on a real cluster while the spec changes, its pod goes, or the operator is killed."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from outrider_operator.kinds import POD

from tests.operator.canaries import (
    BAD,
    BUSY,
    CANARY,
    COMMON,
    GOOD,
    canary_pods,
    has_canary,
    head,
    rollout_of,
    wait_over,
    wait_phase,
)
from tests.operator.client import Service, uids, wait_for
from tests.operator.conftest import Make
from tests.operator.manifests import LOOKUP
from tests.operator.process import OperatorProcess

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def services(make: Make) -> dict[str, Service]:
    """Started together."""
    endless = COMMON | {"rollout": CANARY | {"canary": {"minRequests": 100_000}}}
    return {
        "gradual": make("gradual", replicas=2, standin=BUSY | {"start_s": 4}, **endless),
        "alone": make("alone", replicas=1, standin=BUSY | {"start_s": 15}, **endless),
        "worse": make("worse", replicas=1, standin=BUSY, **COMMON),
        "slow": make("slow", replicas=1, standin=BUSY | {"canary_requests_per_s": 4}, **endless),
    }


@pytest.fixture(scope="module", autouse=True)
def stable_revisions(services: dict[str, Service]) -> dict[str, str]:
    """Revisions before two of them get a draft, at once, so that their canaries run while others are tested."""
    revisions = {}
    for name, draft in (("worse", BAD), ("slow", GOOD)):
        services[name].wait_updated()
        revisions[name] = services[name].revision
        services[name].patch({"draftPool": [LOOKUP, draft]})
    return revisions


@pytest.fixture
def operator_restarted(operator_process: OperatorProcess) -> Generator[OperatorProcess]:
    """A test that kills the operator leaves it running."""
    yield operator_process
    if not operator_process.running():
        operator_process.start()


def test_killed_operator_goes_on_at_each_phase(
    services: dict[str, Service], operator_restarted: OperatorProcess
) -> None:
    """The attempt and its pod stay the same up to the end. It measures until the spec asks for fewer requests: the
    operator may be away for long on a busy machine."""
    service = services["gradual"]
    service.wait_updated()
    service.patch({"draftPool": [LOOKUP, GOOD]})
    wait_for("the canary pod", lambda: canary_pods(service))
    started, pods = wait_phase(service, "Starting")["startedAt"], uids(canary_pods(service))
    for phase in ("Starting", "Measuring"):
        wait_phase(service, phase)
        _kill(operator_restarted, service, f"{phase}/1")
        assert uids(canary_pods(service)) == pods
    service.patch({"rollout": CANARY})
    wait_phase(service, "Promoting")
    _kill(operator_restarted, service, "Promoting/1")
    rollout = wait_phase(service, "Successful")
    assert (rollout["startedAt"], rollout["candidate"]) == (started, service.revision)
    service.wait_updated()
    wait_over(service)


def test_killed_operator_does_not_retry_a_failed_candidate(
    services: dict[str, Service], stable_revisions: dict[str, str], operator_restarted: OperatorProcess
) -> None:
    """The spec keeps the draft, as with GitOps."""
    service = services["worse"]
    failed = wait_phase(service, "Failed", "Worse")
    wait_for("the canary pod to go", lambda: not canary_pods(service))
    _kill(operator_restarted, service, "failed/1")
    rollout = rollout_of(service)
    assert (rollout["phase"], rollout["startedAt"]) == ("Failed", failed["startedAt"])
    assert service.revision == stable_revisions["worse"]
    assert not canary_pods(service)


def test_canary_loses_no_requests_with_its_pod_or_scale(services: dict[str, Service]) -> None:
    """Its pod is deleted, then the service is paused, scaled to 0, and up again."""
    service = services["slow"]
    started, counted = wait_phase(service, "Measuring")["startedAt"], _wait_more_requests(service, 5)
    (pod,) = canary_pods(service)
    service.client.delete(POD, service.namespace, pod["metadata"]["name"])
    wait_for("another pod", lambda: canary_pods(service) and not uids([pod]) & uids(canary_pods(service)))
    counted = _wait_more_requests(service, counted)
    service.patch({"paused": True})
    service.wait("Progressing", "False", "Paused")
    assert len(canary_pods(service)) == 1
    service.patch({"paused": False, "replicas": 0})
    wait_for("no pods", lambda: not service.pods())
    assert (has_canary(service), _requests(service) >= counted) == (True, True)
    counted = _requests(service)
    service.patch({"replicas": 3})
    wait_for("all pods", lambda: len(service.ready_pods()) == 4)
    assert len(canary_pods(service)) == 1
    _wait_more_requests(service, counted)
    rollout = rollout_of(service)
    assert (rollout["phase"], rollout["startedAt"]) == ("Measuring", started)


def test_second_patch_supersedes_and_patch_back_cancels(services: dict[str, Service]) -> None:
    service = services["slow"]
    _back(service)
    revision, pods = service.revision, uids(service.ready_pods())
    service.patch({"draftPool": [LOOKUP, BAD]})
    first = wait_phase(service, "Measuring")["candidate"]
    service.patch({"draftPool": [LOOKUP, head("other")]})
    wait_for("another canary", lambda: rollout_of(service).get("candidate") not in (first, None))
    wait_phase(service, "Measuring")
    _back(service)
    assert (service.revision, rollout_of(service)["phase"]) == (revision, "Cancelled")
    assert uids(service.ready_pods()) == pods


def test_orders_by_hand_name_the_candidate(services: dict[str, Service]) -> None:
    """One that names no revision is ignored, and the canary goes on."""
    service = services["slow"]
    _back(service)
    service.patch({"draftPool": [LOOKUP, GOOD]})
    started = wait_phase(service, "Measuring")["startedAt"]
    service.annotate(promote="nonsense", retry="8a1e43c8ca/2")
    wait_for("the orders to be ignored", lambda: len(rollout_of(service).get("ignored", [])) >= 2)
    rollout = rollout_of(service)
    assert (rollout["phase"], rollout["startedAt"]) == ("Measuring", started)
    service.annotate(promote=rollout["candidate"])
    service.wait_updated()
    rollout = rollout_of(service)
    assert (rollout["phase"], rollout["startedAt"]) == ("Successful", started)
    assert rollout["candidate"] == service.revision


def test_canary_pod_answers_while_it_is_the_only_ready_one(services: dict[str, Service]) -> None:
    """Bug: the end of the canary took the last endpoint away, and every request failed until the other had started."""
    service = services["alone"]
    service.wait_updated()
    service.patch({"draftPool": [LOOKUP, GOOD]})
    candidate = wait_phase(service, "Measuring")["candidate"]
    (canary,) = canary_pods(service)
    (stable,) = [pod for pod in service.pods() if uids([pod]) != uids([canary])]
    service.client.delete(POD, service.namespace, stable["metadata"]["name"])
    service.annotate(abort=candidate)
    wait_phase(service, "Failed", "AbortedByHand")

    def others() -> set[str]:
        ready = uids(service.ready_pods())
        assert ready - uids([stable]), "an endpoint that answers"
        assert service.condition("Ready")["status"] == "True"
        return ready - uids([canary, stable])

    wait_for("another pod", others)
    wait_for("the canary pod to go", lambda: not canary_pods(service))


def _kill(operator: OperatorProcess, service: Service, order: str) -> None:
    """Kill the operator, and return once it decides again: an order that names no revision shows it."""
    operator.kill()
    operator.start()
    service.annotate(abort=order)
    wait_for("the operator to be back", lambda: f"abort={order}" in rollout_of(service).get("ignored", []))


def _requests(service: Service) -> int:
    return int(rollout_of(service).get("requests", 0))


def _wait_more_requests(service: Service, than: int) -> int:
    wait_for(f"more than {than} requests", lambda: _requests(service) > than)
    return _requests(service)


def _back(service: Service) -> None:
    """Patch the pool back to the lookup that runs."""
    service.patch({"draftPool": [LOOKUP]})
    service.wait_updated()
    wait_over(service)
