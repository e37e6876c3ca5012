"""A draft that cannot be loaded stays in the first new pod, held by Kubernetes itself."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from outrider_operator.kinds import DEPLOYMENT

from tests.operator.client import Service, uids, wait_for
from tests.operator.conftest import Make
from tests.operator.manifests import EAGLE, LOOKUP
from tests.operator.process import OperatorProcess

pytestmark = pytest.mark.cluster

SURGE = {"maxSurge": 3, "maxUnavailable": 0, "drainTimeout": "1s", "progressDeadline": "300s"}
SWAP = {"maxSurge": 0, "maxUnavailable": 2, "drainTimeout": "1s", "progressDeadline": "300s"}
BAD, GOOD = [LOOKUP, EAGLE], [LOOKUP, EAGLE | {"name": "eagle-2"}]


@pytest.fixture(scope="module")
def services(make: Make) -> dict[str, Service]:
    """Whose pods cannot load the drafter `eagle`, started together."""
    common: dict[str, Any] = {"standin": {"unloadable": "eagle", "start_s": 5}, "profiling": {"mode": "Skip"}}
    return {
        "surge": make("surge", replicas=3, rollout=SURGE, **common),
        "swap": make("swap", replicas=3, rollout=SWAP, **common),
        "single": make("single", replicas=1, rollout=SURGE, **common),
    }


@pytest.fixture
def operator_restarted(operator_process: OperatorProcess) -> Generator[OperatorProcess]:
    """A test that kills the operator leaves it running."""
    yield operator_process
    if not operator_process.running():
        operator_process.start()


def test_a_missing_draft_is_held_while_no_operator_runs(
    services: dict[str, Service], operator_restarted: OperatorProcess
) -> None:
    """The operator is killed before the new pods are ready. The Deployments' controller sees them ready, and takes no
    old pod for them; neither does the operator once it is back. The next draft rolls out."""
    for service in services.values():
        service.wait_updated()
    rollouts = [
        HeldRollout(services["surge"], 3, 1),
        HeldRollout(services["swap"], 2, 1),
        HeldRollout(services["single"], 1, 1),
    ]
    for rollout in rollouts:
        rollout.service.patch({"draftPool": BAD})
    for rollout in rollouts:
        rollout.wait_for_a_new_pod()
    operator_restarted.kill()
    for rollout in rollouts:
        rollout.assert_held_by_kubernetes()
    operator_restarted.start()
    for rollout in rollouts:
        rollout.assert_held_by_the_operator()
        rollout.service.patch({"draftPool": GOOD})
    for service in services.values():
        service.wait_updated()
        assert len(service.ready_pods()) == service.read()["spec"]["replicas"]
        assert "minReadySeconds" not in service.child(DEPLOYMENT)["spec"]


class HeldRollout:
    """A rollout of a draft that cannot be loaded: so many old pods serve on, next to so many new ones."""

    def __init__(self, service: Service, old: int, new: int) -> None:
        self.service = service
        self._old, self._new = old, new
        self._before, self._revision = uids(service.ready_pods()), service.revision

    def wait_for_a_new_pod(self) -> None:
        wait_for("a pod of the new revision", lambda: uids(self.service.pods()) - self._before)

    def assert_held_by_kubernetes(self) -> None:
        """Counts of before the rollout, which are seen for a moment, may add up to as many ready pods."""
        counts, expected = ("readyReplicas", "availableReplicas"), [self._old + self._new, self._old]
        wait_for("a ready pod that is not available", lambda: [deployed(self.service, it) for it in counts] == expected)
        self._assert_counts()

    def assert_held_by_the_operator(self) -> None:
        progressing = self.service.wait("Progressing", "False", "DrafterNotLoaded")
        assert (
            "drafter eagle is not loaded: its weights do not fit the target. The old pods serve on."
            in progressing["message"]
        )
        assert self.service.condition("Updated")["reason"] == "DrafterNotLoaded"
        assert uids(old_pods(self.service, self._revision)) <= self._before
        self._assert_counts()

    def _assert_counts(self) -> None:
        assert (len(old_pods(self.service, self._revision)), len(self.service.pods())) == (
            self._old, self._old + self._new
        )  # fmt: skip


def test_a_held_rollout_grows_by_old_pods_alone(services: dict[str, Service]) -> None:
    """Kubernetes scales both revisions in proportion: an autoscaler would multiply the pod that lacks a drafter."""
    service = services["surge"]
    service.wait_updated()
    service.patch({"draftPool": BAD})
    service.wait("Progressing", "False", "DrafterNotLoaded")
    unproven = service.revision
    service.patch({"replicas": 8})
    wait_for("the old pods", lambda: len(service.ready_pods()) == 9)
    assert len(old_pods(service, unproven)) == 1
    service.patch({"replicas": 3, "draftPool": GOOD})
    service.wait_updated()


def test_a_held_rollout_is_reverted_to_the_pods_that_serve(services: dict[str, Service]) -> None:
    """Patched back, the old pods have never gone, and the bad one does."""
    service = services["surge"]
    service.wait_updated()
    wait_for("the end of a scale-down", lambda: len(service.ready_pods()) == len(service.pods()) == 3)
    before, revision = uids(service.ready_pods()), service.revision
    service.patch({"draftPool": BAD})
    service.wait("Progressing", "False", "DrafterNotLoaded")
    service.patch({"draftPool": GOOD})
    service.wait_updated()
    wait_for("the bad pod to go", lambda: uids(service.pods()) == before)
    assert service.revision == revision


def test_continue_rolls_out_without_the_drafter(services: dict[str, Service]) -> None:
    service = services["single"]
    service.wait_updated()
    service.patch({"draftPool": BAD})
    service.wait("Progressing", "False", "DrafterNotLoaded")
    service.patch({"rollout": {"onMissingDrafter": "Continue"}})
    service.wait_updated()
    assert len(old_pods(service, service.revision)) == 1


def old_pods(service: Service, revision: str) -> list[dict[str, Any]]:
    """Ready pods of `revision`."""
    return [pod for pod in service.ready_pods() if pod["metadata"]["labels"]["outrider.dev/revision"] == revision]


def deployed(service: Service, count: str) -> int:
    return int(service.child(DEPLOYMENT)["status"].get(count, 0))
