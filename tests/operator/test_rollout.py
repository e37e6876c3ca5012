"""How a change of the spec reaches the pods: hot, not at all, or as a revision that rolls out."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

import pytest
from outrider_crds.runtime_config import ADMIN_PORT, CONFIG_KEY, SERVING_PORT, STATE_PATH, HotConfig, config_hash
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT, POD

from tests.cluster.cluster import Cluster
from tests.operator.client import PATIENCE_S, Service, is_ready, uids, wait_for
from tests.operator.conftest import Make
from tests.operator.manifests import BLOCK, CLASSES, EAGLE, LOOKUP, MTP, environment

pytestmark = pytest.mark.cluster

HOT: dict[str, dict[str, Any]] = {
    "speculation.mode": {"speculation": {"mode": "Off"}},
    "speculation.draftPrefill": {"speculation": {"draftPrefill": "Never"}},
    "speculation.maxDraftTokens, lower": {"speculation": {"maxDraftTokens": 2}},
    "sloClasses": {"sloClasses": [CLASSES[0]]},
    "defaultSLOClass": {"defaultSLOClass": "chat"},
}
NO_EFFECT: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 3},
    "rollout": {"rollout": {"maxSurge": 2, "progressDeadline": "90s"}},
    "profiling": {"profiling": {"timeBudget": "1m"}},
    "paused": {"paused": True},
}
REVISION: dict[str, dict[str, Any]] = {
    "speculation.maxDraftTokens, higher": {"speculation": {"maxDraftTokens": 9}},
    "draftPool": {"draftPool": [LOOKUP, EAGLE]},
    "engine.maxModelLen": {"engine": {"maxModelLen": 512}},
    "engine.dtype": {"engine": {"dtype": "float32"}},
    "engine.extraArgs": {"engine": {"extraArgs": ["--max-num-seqs=8"]}},
    "engine.env": {"engine": {"env": environment(tokens_per_s=1)}},
    "target.name": {"target": {"name": "tests/other"}},
    "modelCache": {"modelCache": {"emptyDir": {"sizeLimit": "1Gi"}}},
    "accelerator.nodeSelector": {"accelerator": {"nodeSelector": {"disk": "fast"}}},
    "podTemplate.labels": {"podTemplate": {"labels": {"team": "search"}}},
    "podTemplate.image": {"podTemplate": {"image": "outrider.local/runtime-cpu:dev"}},
}


@pytest.fixture(scope="module")
def services(make: Make) -> dict[str, Service]:
    """All services of this module, started together."""
    return {
        "hot": make("hot", replicas=2),
        "empty": make("empty", replicas=0, profiling={"mode": "Skip"}),
        "surge": make("surge", replicas=2, profiling={"mode": "Skip"}),
        "swap": make(
            "swap",
            replicas=2,
            profiling={"mode": "Skip"},
            rollout={"maxSurge": 0, "maxUnavailable": 1, "drainTimeout": "5s", "progressDeadline": "300s"},
        ),
        "hasty": make("hasty", profiling={"mode": "Skip"}),
        "broken": make(
            "broken",
            standin={"crash": 1},
            profiling={"mode": "Skip"},
            rollout={"maxSurge": 0, "maxUnavailable": 1, "drainTimeout": "1s", "progressDeadline": "300s"},
        ),
    }


@pytest.fixture(scope="module")
def hot(services: dict[str, Service]) -> Service:
    service = services["hot"]
    service.wait_updated()
    service.wait("ProfilesReady", "True")
    return service


@pytest.mark.parametrize("field", HOT)
def test_hot_field_takes_effect_without_a_restart(hot: Service, field: str) -> None:
    """`mode: Off` must not reload a 70B model: the same pods report the new configuration."""
    before, revision = uids(hot.pods()), hot.revision
    hot.patch(HOT[field])
    hot.wait_updated()
    assert uids(hot.pods()) == before
    assert hot.revision == revision
    config = json.loads(hot.child(CONFIG_MAP, "hot-hot")["data"][CONFIG_KEY])
    assert {_reported(pod)["configHash"] for pod in hot.ready_pods()} == {_hash(config)}


@pytest.mark.parametrize("field", NO_EFFECT)
def test_field_without_effect_restarts_nothing(hot: Service, field: str) -> None:
    """Pods that run go on running, and no revision is made."""
    before, revision = uids(hot.pods()), hot.revision
    generation = hot.patch(NO_EFFECT[field])["metadata"]["generation"]
    wait_for("the change to be seen", lambda: hot.condition("SpecValid")["observedGeneration"] == generation)
    assert uids(hot.pods()) >= before
    assert hot.revision == revision


@pytest.mark.parametrize("field", REVISION)
def test_other_field_makes_a_revision(services: dict[str, Service], field: str) -> None:
    """Everything else: a new immutable ConfigMap, named in the pods' label."""
    service = services["empty"]
    wait_for("the Deployment", lambda: service.client.get(DEPLOYMENT, service.namespace, "empty"))
    before = service.revision
    service.patch(REVISION[field])
    wait_for(f"a revision for {field}", lambda: service.revision != before)
    assert service.child(CONFIG_MAP, f"empty-{service.revision}")["immutable"] is True


@pytest.mark.parametrize(("name", "least"), [("surge", 2), ("swap", 1)])
def test_rollout_keeps_enough_pods_ready(services: dict[str, Service], name: str, least: int) -> None:
    """Sampled every 200 ms, the pods that have served and are not terminating are never fewer than
    replicas - maxUnavailable; a running request of a replaced pod is answered to its end. A pod whose probe times out
    on a busy machine is unready for a moment, and no rollout took it."""
    service = services[name]
    service.wait_updated()
    wait_for("both pods", lambda: len(service.ready_pods()) == 2)
    have_served = uids(service.pods())
    request = Request(service.ready_pods()[0]["status"]["podIP"], tokens=60)
    service.patch({"engine": {"maxModelLen": 2048}})
    samples: list[int] = []

    def is_over() -> bool:
        pods = service.pods()
        have_served.update(uids([pod for pod in pods if is_ready(pod)]))
        samples.append(len(have_served & uids(pods)))
        return service.updated() is not None

    wait_for("the end of the rollout", is_over, every_s=0.2)
    assert min(samples) >= least
    assert request.answer().endswith("data: [DONE]\n\n")
    assert {pod["metadata"]["labels"]["outrider.dev/revision"] for pod in service.pods()} == {service.revision}


def test_five_quick_patches_end_at_the_last(services: dict[str, Service]) -> None:
    """Coalesced: the last one runs, and ConfigMaps of unused revisions are gone."""
    service = services["hasty"]
    service.wait_updated()
    for length in (101, 102, 103, 104, 105):
        service.patch({"engine": {"maxModelLen": length}})
    service.wait_updated()
    boot = json.loads(service.child(CONFIG_MAP, f"hasty-{service.revision}")["data"][CONFIG_KEY])
    assert boot["engine"]["maxModelLen"] == 105
    assert {pod["metadata"]["labels"]["outrider.dev/revision"] for pod in service.ready_pods()} == {service.revision}


def test_block_and_mtp_drafts_come_pause_and_go_by_patch(services: dict[str, Service]) -> None:
    """Several at once; a pause is hot, and what is taken out of the pool is gone from the next pods."""
    service = services["hasty"]
    second = BLOCK | {"name": "spark"}
    service.patch({"draftPool": [LOOKUP, BLOCK, second, MTP]})
    service.wait_updated()
    wait_for("four drafts", lambda: _loaded(service) == ["lookup", "flash", "spark", "mtp"])
    before, revision = uids(service.pods()), service.revision
    service.patch({"draftPool": [LOOKUP, BLOCK, second | {"paused": True}, MTP | {"paused": True}]})
    service.wait_updated()
    assert (uids(service.pods()), service.revision) == (before, revision)
    hot = json.loads(service.child(CONFIG_MAP, "hasty-hot")["data"][CONFIG_KEY])
    assert hot["pausedDrafters"] == ["spark", "mtp"]
    assert {_reported(pod)["configHash"] for pod in service.ready_pods()} == {_hash(hot)}
    service.patch({"draftPool": [LOOKUP, MTP]})
    service.wait_updated()
    assert service.revision != revision
    wait_for("two drafts", lambda: _loaded(service) == ["lookup", "mtp"])
    assert [entry["name"] for entry in _reported(service.ready_pods()[0])["drafters"]] == ["lookup", "mtp"]


def test_a_revert_in_mid_rollout_keeps_the_old_pods(services: dict[str, Service]) -> None:
    """A revision that never gets ready is taken back: the old pods served all along."""
    service = services["hasty"]
    service.wait_updated()
    before, revision = uids(service.ready_pods()), service.revision
    good = service.read()["spec"]["engine"]
    service.patch({"engine": {"env": environment(start_s=-1)}})
    wait_for("a pod of the bad revision", lambda: uids(service.pods()) > before)
    assert service.condition("Ready")["status"] == "True"
    service.patch({"engine": good})
    service.wait_updated()
    assert uids(service.ready_pods()) == before
    assert service.revision == revision


def test_a_revert_to_pods_that_crash_is_not_complete(services: dict[str, Service]) -> None:
    """Their ReplicaSet is retained, and the Deployment's controller calls it available: the pods' own word counts."""
    service = services["broken"]
    service.wait("Progressing", "False", "Stalled")
    crashing, revision = service.read()["spec"]["engine"], service.revision
    service.patch({"engine": {"env": environment()}})
    service.wait_updated()
    service.patch({"engine": crashing})
    wait_for("the Deployment to return", lambda: service.revision == revision)
    wait_for("a pod that crashes", lambda: _crashes(service))
    progressing = service.wait("Progressing", "False", "Stalled")
    assert "no such weights" in progressing["message"]
    assert service.condition("Updated")["status"] == "False"


def test_scale_during_a_rollout(services: dict[str, Service], cluster: Cluster) -> None:
    """`kubectl scale` (as an autoscaler would) and a rollout at once: both arrive."""
    service = services["hasty"]
    service.wait_updated()
    service.patch({"engine": {"maxModelLen": 333}})
    cluster.kubectl("scale", "specsvc/hasty", "--replicas=3", "-n", service.namespace)
    service.wait_updated()
    wait_for("three pods", lambda: len(service.ready_pods()) == 3)
    wait_for("three pods in the status", lambda: service.read()["status"]["replicas"] == 3)
    document = service.read()
    assert document["spec"]["replicas"] == 3
    assert service.child(DEPLOYMENT)["spec"]["replicas"] == 3
    assert {pod["metadata"]["labels"]["outrider.dev/revision"] for pod in service.ready_pods()} == {service.revision}
    selected = service.client.list(POD, service.namespace, document["status"]["selector"])
    assert uids(selected) >= uids(service.pods())  # pods that still drain are among the selected


class Request:
    """A streamed request that runs in the background."""

    def __init__(self, address: str, tokens: int) -> None:
        body = json.dumps({"model": "any", "stream": True, "max_tokens": tokens}).encode()
        url = f"http://{address}:{SERVING_PORT}/v1/chat/completions"
        self._response = urllib.request.urlopen(url, data=body, timeout=PATIENCE_S)
        self._text = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def answer(self) -> str:
        self._thread.join(PATIENCE_S)
        return self._text.decode()

    def _read(self) -> None:
        with self._response as response:
            self._text = response.read()


def _loaded(service: Service) -> list[str]:
    """Names of the drafts that the status calls loaded, in its order."""
    return [draft["name"] for draft in service.read()["status"]["drafts"] if draft.get("loaded")]


def _crashes(service: Service) -> bool:
    statuses = [status for pod in service.pods() for status in pod["status"].get("containerStatuses") or ()]
    return bool(statuses) and all(status["restartCount"] > 0 for status in statuses)


def _reported(pod: dict[str, Any]) -> dict[str, Any]:
    url = f"http://{pod['status']['podIP']}:{ADMIN_PORT}{STATE_PATH}"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        state: dict[str, Any] = json.load(answer)
    return state


def _hash(config: dict[str, Any]) -> str:
    return config_hash(HotConfig.model_validate(config))
