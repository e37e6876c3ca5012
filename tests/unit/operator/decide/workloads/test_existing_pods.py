"""`workload.existing`: pods that another workload makes. Outrider writes one ConfigMap, and says the rest."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.conditions import ConditionType
from outrider_operator.cluster_model import CONFIG_MAP
from outrider_operator.decide import decide
from outrider_operator.figure_windows import FigureWindows

from tests.unit.operator.decide.window_counts import window_counts
from tests.unit.operator.decide.workloads.existing_world import EXISTING, ExistingWorld
from tests.unit.operator.decide.world import EAGLE, PLD, World, manifest

C = ConditionType


@pytest.fixture
def world() -> ExistingWorld:
    """The spec is in force in both pods."""
    world = ExistingWorld(draftPool=[PLD, EAGLE], speculation={"maxDraftTokens": 3})
    world.settle()
    world.report()
    return world


def test_existing_pods_get_one_config_map_and_nothing_else() -> None:
    world = ExistingWorld(draftPool=[PLD, EAGLE], speculation={"maxDraftTokens": 3})
    world.settle()
    assert list(world.objects) == [(CONFIG_MAP, "chat-config")]
    file = world.file()
    assert [drafter["name"] for drafter in file["draftPool"]] == ["pld", "eagle"]
    assert [slo["name"] for slo in file["sloClasses"]] == ["chat"]
    assert (file["speculation"]["maxDraftTokens"], set(file)) == (3, {"draftPool", "sloClasses", "speculation"})


def test_file_is_read_after_a_restart_and_not_written_again(world: ExistingWorld) -> None:
    """Bug: the cache keeps ConfigMaps without data, so that a new operator wrote the file once a second."""
    document = world.objects[CONFIG_MAP, "chat-config"]
    data = document.pop("data")
    plan = decide(world.observed(), world.settings)
    assert (plan.read, plan.apply) == (("chat-config",), ())
    document["data"] = data
    assert world.reconcile().is_idle


def test_spec_in_force_in_all_existing_pods_is_updated(world: ExistingWorld) -> None:
    kinds = (C.SPEC_VALID, C.PROFILES_READY, C.AVAILABLE, C.UPDATED, C.PROGRESSING, C.READY, C.RECONCILING, C.STALLED)
    assert [world.reason(kind) for kind in kinds] == [
        "True/Accepted", "False/Learning", "True/EnoughReadyPods", "True/UpToDate", "False/Complete",
        "True/EndpointReady", "False/Reconciled", "False/NotStalled",
    ]  # fmt: skip
    status = world.services["chat"]["status"]
    assert [status[name] for name in ("replicas", "readyReplicas", "updatedReplicas")] == [2, 2, 2]
    assert status["selector"] == "app=llama"


def test_hot_change_is_pending_until_existing_pods_have_it(world: ExistingWorld) -> None:
    world.change(speculation={"mode": "Off"})
    assert world.file()["speculation"]["mode"] == "Off"
    assert world.reason(C.UPDATED) == "False/ConfigPending"
    assert "llama-a (not that of ConfigMap chat-config)" in world.condition(C.UPDATED).message
    assert world.reason(C.PROGRESSING) == "True/RollingOut"
    world.report()
    assert world.reason(C.UPDATED) == "True/UpToDate"


def test_change_that_needs_a_restart_names_the_pods(world: ExistingWorld) -> None:
    plan = world.report(restart_reason="the drafters changed")
    assert world.reason(C.UPDATED) == world.reason(C.PROGRESSING) == "False/RestartNeeded"
    assert world.reason(C.STALLED) == "True/RestartNeeded"
    message = world.condition(C.UPDATED).message
    assert "restart llama-a (the drafters changed), llama-b (the drafters changed)." in message
    assert plan.is_idle


def test_pod_that_refuses_the_file_is_named_with_its_sentence(world: ExistingWorld) -> None:
    world.report(config_error="the file has two documents")
    assert world.reason(C.UPDATED) == "False/ConfigPending"
    assert "llama-a (the file has two documents)" in world.condition(C.UPDATED).message


def test_pod_that_is_not_active_is_named_with_its_reason(world: ExistingWorld) -> None:
    del world.states["llama-b"]
    world.unreachable = {"llama-b": "HTTP status 503: Outrider is not active: this is vLLM 0.31"}
    world.settle()
    assert world.reason(C.UPDATED) == "False/NotActive"
    assert "llama-b (HTTP status 503: Outrider is not active: this is vLLM 0.31)" in world.condition(C.UPDATED).message
    assert "llama-a" not in world.condition(C.UPDATED).message
    assert world.reason(C.STALLED) == "True/NotActive"
    assert world.reason(C.READY) == "True/EndpointReady"


@pytest.mark.parametrize(
    ("report", "words"), [({"file_digest": ""}, "older release"), ({"plugin_active": False}, "does not report")]
)
def test_plugin_that_follows_no_file_is_not_active(world: ExistingWorld, report: dict[str, Any], words: str) -> None:
    world.report(**report)
    assert world.reason(C.UPDATED) == "False/NotActive"
    assert words in world.condition(C.UPDATED).message


def test_selector_without_pods_is_a_condition_with_the_labels(world: ExistingWorld) -> None:
    world.selected.clear()
    world.settle()
    assert {world.reason(kind) for kind in (C.AVAILABLE, C.UPDATED, C.PROGRESSING)} == {"False/NoPodSelected"}
    assert "app=llama" in world.condition(C.UPDATED).message
    assert world.reason(C.READY) == "False/NoReadyEndpoint"
    assert world.reason(C.STALLED) == "False/NotStalled"


def test_pod_of_two_services_is_a_condition_that_names_both(world: ExistingWorld) -> None:
    world.rivals = {"llama-b": "other"}
    world.settle()
    assert world.reason(C.UPDATED) == "False/PodShared"
    assert "llama-b (other)" in world.condition(C.UPDATED).message
    assert world.reason(C.STALLED) == "True/PodShared"


def test_pods_that_are_not_ready_wait_without_a_fault() -> None:
    world = ExistingWorld()
    for pod in world.selected:
        world.end_readiness(pod)
    world.settle()
    assert [world.reason(kind) for kind in (C.AVAILABLE, C.UPDATED, C.READY)] == [
        "False/TooFewReadyPods", "False/ConfigPending", "False/NoReadyEndpoint",
    ]  # fmt: skip


def test_pods_that_crash_are_pending_with_their_last_words() -> None:
    """Updated took the reason of Available, which no page lists for it."""
    world = ExistingWorld()
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "no such model"}}
    for pod in world.selected:
        world.end_readiness(pod)
        waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
        world.selected[pod]["status"]["containerStatuses"] = [{"name": "vllm", "state": waiting, "lastState": ended}]
    world.settle()
    assert [world.reason(kind) for kind in (C.AVAILABLE, C.UPDATED)] == ["False/PodCrashing", "False/ConfigPending"]
    assert "no such model" in world.condition(C.UPDATED).message


def test_ready_pod_without_an_answer_yet_is_pending() -> None:
    world = ExistingWorld()
    world.settle()
    assert world.reason(C.UPDATED) == "False/ConfigPending"
    assert "llama-a (no report)" in world.condition(C.UPDATED).message


def test_pod_that_does_not_answer_yet_is_pending_with_the_reason(world: ExistingWorld) -> None:
    """A pod without a readiness probe counts as ready while its engine loads: nothing is wrong."""
    del world.states["llama-b"]
    world.unreachable = {"llama-b": "Connection refused"}
    world.settle()
    assert world.reason(C.UPDATED) == "False/ConfigPending"
    assert "llama-b (Connection refused)" in world.condition(C.UPDATED).message
    assert world.reason(C.STALLED) == "False/NotStalled"


def test_figures_of_existing_pods_are_in_the_status(world: ExistingWorld) -> None:
    world.figures = FigureWindows(window_counts(output_tokens=6000, request_steps=3000))
    world.settle()
    status = world.services["chat"]["status"]
    assert float(status["goodput"]["tokensPerSecond"]) > 0
    assert {draft["name"] for draft in status["drafts"]} == {"pld", "eagle"}


def test_foreign_config_map_of_the_name_is_left_alone() -> None:
    world = ExistingWorld()
    labels = {"outrider.dev/service": "chat"}  # which anyone may write
    metadata = {"name": "chat-config", "namespace": "default", "uid": "theirs", "resourceVersion": "1"}
    world.objects[CONFIG_MAP, "chat-config"] = {"kind": CONFIG_MAP, "metadata": {**metadata, "labels": labels}}
    assert world.settle().is_idle
    assert world.reason(C.SPEC_VALID) == "False/NameConflict"


def test_service_that_made_pods_does_not_leave_them() -> None:
    """A Deployment that nothing owns any more would serve on, unseen, on paid hardware."""
    world = World(manifest()).served()
    before = dict(world.objects)
    world.change(workload=EXISTING)
    assert world.reason(C.SPEC_VALID) == "False/InvalidSpec"
    assert "delete the service and apply it again" in world.condition(C.SPEC_VALID).message
    assert world.objects.keys() == before.keys()


def test_unknown_field_of_pod_template_is_refused_for_existing_pods() -> None:
    """CEL does not see the fields that podTemplate does not declare."""
    world = ExistingWorld(podTemplate={"priorityClassName": "high"})
    world.settle()
    assert world.reason(C.SPEC_VALID) == "False/InvalidSpec"
    assert "podTemplate.priorityClassName" in world.condition(C.SPEC_VALID).message
    assert world.objects == {}


def test_deleted_service_writes_nothing_more(world: ExistingWorld) -> None:
    world.services["chat"]["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    assert decide(world.observed(), world.settings).is_idle
