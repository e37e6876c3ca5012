"""One manifest becomes a self-tuning service: the promises of the README, on a real cluster with real vLLM.

The tests share one service and run in the order they stand in.
"""

from __future__ import annotations

import json

import pytest
import yaml
from outrider_crds.runtime_config import MODEL_CACHE_DIR
from outrider_runtime.control.choose_drafters import best_choice

from demo.service import JsonObject, condition, shows_acceptance
from setup.steps import REPOSITORY
from tests.e2e.conftest import NAME, PATIENCE_S, Service

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(2 * PATIENCE_S)]

SECOND_DRAFT = REPOSITORY / "examples" / "smollm2-second-draft-patch.yaml"


def test_the_latency_model_of_target_and_every_drafter_is_stored(service: Service) -> None:
    """The profiling Job's result is in a ConfigMap, under the keys of target and drafters, with its error."""
    profile = service.follower.look()["status"]["profiles"][0]
    stored = service.cluster.get("configmap", profile["configMap"])["data"]
    assert "target.json" in stored
    assert {json.loads(text)["name"] for key, text in stored.items() if key != "target.json"} == {"lookup", "eagle"}
    assert float(profile["errorPercent"]) == pytest.approx(json.loads(stored["target.json"])["errorPercent"], rel=0.01)


def test_serving_pods_run_with_no_more_rights_than_they_need(service: Service) -> None:
    """Non-root, read-only root file system, no escalation, no capabilities, no API token: and it serves."""
    (pod,) = service.pods()
    security = pod["spec"]["containers"][0]["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_no_pod_compiles_what_its_image_brings_along(service: Service) -> None:
    """Promise: a pod is not two minutes late because it compiles the control core."""
    (pod,) = service.pods()
    look = ("find", MODEL_CACHE_DIR, "-name", f"{best_choice.__module__}*")
    assert service.cluster.kubectl("exec", pod["metadata"]["name"], "--", *look) == ""


def test_status_has_figures_of_the_requests_that_were_answered(service: Service) -> None:
    """Goodput, acceptance per drafter and attainment per class come from the requests that were answered."""
    with service.load(concurrency=2) as load:
        seen = service.follower.follow_until(_has_figures, timeout_s=PATIENCE_S, what="figures in the status")
    assert load.errors == []
    status = seen["status"]
    assert float(status["goodput"]["tokensPerSecond"]) > 0
    assert {entry["name"] for entry in status["sloClasses"]} == {"interactive", "batch"}
    assert all(0 <= float(d["acceptanceRate"]) <= 1 for d in status["drafts"] if d.get("acceptanceRate"))
    assert all(d["loaded"] and d["profiled"] for d in status["drafts"])
    assert condition(seen, "SpeculationActive")["status"] != "Unknown"
    assert "tok/s" in service.cluster.kubectl("get", "specsvc", NAME)


def test_mode_off_takes_effect_without_a_restart(service: Service) -> None:
    """`speculation.mode: Off` is hot: the same pod, no restart, and the condition says Off."""
    before = [(pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in service.pods()]
    service.patch('{"spec": {"speculation": {"mode": "Off"}}}')
    service.until_updated()
    with service.load(concurrency=1) as load:
        service.follower.follow_until(
            lambda seen: condition(seen, "SpeculationActive").get("reason") == "Off",
            timeout_s=PATIENCE_S, what="SpeculationActive=False/Off",
        )  # fmt: skip
    after = [(pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in service.pods()]
    assert load.errors == []
    assert after == before
    service.patch('{"spec": {"speculation": {"mode": "ClosedLoop"}}}')
    service.until_updated()


def test_a_second_draft_rolls_out_without_a_failed_request(service: Service) -> None:
    """Only the new drafter is measured, no request fails meanwhile, and its acceptance shows in the status next to that
    of the head: both live in one engine with the lookup."""
    profile = service.follower.look()["status"]["profiles"][0]["configMap"]
    target_before = service.cluster.get("configmap", profile)["data"]["target.json"]
    with service.load(concurrency=1, thinking_s=2.0) as load:
        service.cluster.kubectl("patch", "specsvc", NAME, "--type=json", "--patch-file", str(SECOND_DRAFT))
        service.until_updated()
        seen = service.follower.follow_until(
            lambda it: shows_acceptance(it, "first-layers") and shows_acceptance(it, "eagle"),
            timeout_s=PATIENCE_S, what="the acceptance of both drafts",
        )  # fmt: skip
    assert load.errors == []
    assert len(load.answers) > 0
    (added,) = yaml.safe_load(SECOND_DRAFT.read_text())
    assert [d["name"] for d in seen["status"]["drafts"]] == ["lookup", "eagle", added["value"]["name"]]
    assert all(d["loaded"] for d in seen["status"]["drafts"])
    assert service.cluster.get("configmap", profile)["data"]["target.json"] == target_before


def test_deleting_the_service_removes_everything_of_it(service: Service) -> None:
    """Owner references alone take the children along; nothing waits for a finalizer."""
    service.cluster.kubectl("delete", "specsvc", NAME, "--wait")
    kinds = "deployments,replicasets,pods,services,configmaps,poddisruptionbudgets,serviceaccounts,jobs"
    service.cluster.wait_until(
        "the children's end",
        lambda: not service.cluster.kubectl("get", kinds, "-l", f"outrider.dev/service={NAME}", "-o", "name").strip(),
        timeout_s=PATIENCE_S,
    )


def _has_figures(service: JsonObject) -> bool:
    status = service.get("status", {})
    attained = all(entry.get("attainmentPercent") for entry in status.get("sloClasses", [])) and status.get(
        "sloClasses"
    )
    known = condition(service, "SpeculationActive").get("status") in {"True", "False"}
    return bool(status.get("goodput") and attained and known)
