"""Profiling Jobs: what runs, what fails, and what is measured again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_operator.cluster_model import JOB
from outrider_operator.decide.desired.profile_store import FIRST_RETRY_S
from outrider_operator.decide.profiling.measurement_request import request_of

from tests.unit.operator.decide.world import EAGLE, PLD, World, manifest, result, rfc3339, started

SPARSE = {"name": "self", "method": "SparseSelf", "sparseSelf": {}}


@pytest.mark.parametrize(
    ("message", "exit_code"),
    [("Traceback ...\nRuntimeError: no such model /models/x", 1), ("hello", 0), ("", 137), ('{"target": 3}', 0)],
)
def test_failed_job_is_a_condition_with_its_last_lines(message: str, exit_code: int) -> None:
    """Failure is a condition in the pod's own words; the Job goes, and the key is not tried again."""
    world = started()
    world.finish_job(world.jobs()[0], message, exit_code=exit_code, reason="Error")
    world.settle()
    ready = world.condition(C.PROFILES_READY)
    assert (ready.status, ready.reason) == ("False", "Failed")
    assert message.split("\n")[-1] in ready.message
    assert "outrider.dev/reprofile" in ready.message
    assert world.jobs() == []
    world.now += 3600
    world.settle()
    assert len(world.created_jobs) == 1
    profile = world.observed().status.profiles[0]
    assert (profile.failed_key, profile.config_map) == (world.created_jobs[0].keys.target, "")


def test_a_result_that_cannot_be_read_says_where() -> None:
    """The condition showed nothing but the whole document."""
    world = started()
    request = request_of(world.objects[JOB, world.jobs()[0]])
    assert request is not None
    moment = rfc3339(world.now)
    world.finish_job(world.jobs()[0], result(request, moment).model_dump_json(by_alias=True).replace(moment, "soon"))
    world.settle()
    assert "target.measuredAt" in world.condition(C.PROFILES_READY).message


def test_a_failed_key_runs_again_on_a_changed_spec_or_on_request() -> None:
    """A longer timeout, or a new value of the annotation; the same value asks once."""
    world = started()
    world.finish_job(world.jobs()[0], "no", exit_code=1)
    world.settle()
    world.change(profiling={"timeout": "2h"})
    assert len(world.created_jobs) == 2
    world.finish_job(world.jobs()[0], "no", exit_code=1)
    world.settle()
    world.services["chat"]["metadata"]["annotations"] = {"outrider.dev/reprofile": "please"}
    world.settle()
    assert len(world.created_jobs) == 3
    world.finish_job(world.jobs()[0], "no", exit_code=1)
    world.settle()
    world.settle()
    assert len(world.created_jobs) == 3


def test_a_reprofile_request_measures_everything_again_once() -> None:
    """Also what was measured well; the old profile serves meanwhile."""
    world = World(manifest()).served()
    world.services["chat"]["metadata"]["annotations"] = {"outrider.dev/reprofile": "2026-12-01"}
    world.settle()
    assert world.created_jobs[-1].target
    assert world.reason(C.PROFILES_READY) == "True/Profiled"
    world.now += 60
    world.profile(world.jobs()[0])
    assert len(world.created_jobs) == 2
    assert world.observed().status.profiles[0].profiled_at == rfc3339(world.now)


def test_draft_of_another_vocabulary_is_named_rest_is_used() -> None:
    """VocabularyMismatch names the drafter; target and prompt lookup are stored."""
    world = started(draftPool=[PLD, EAGLE])
    world.profile(world.jobs()[0], failing={"eagle": "VocabularyMismatch"})
    ready = world.condition(C.PROFILES_READY)
    assert (ready.status, ready.reason) == ("False", "VocabularyMismatch")
    assert "eagle" in ready.message
    assert [(d.name, d.profiled) for d in world.observed().status.drafts] == [("pld", True), ("eagle", False)]
    assert world.observed().status.drafts[1].reason


def test_key_missing_from_the_result_is_not_tried_for_ever() -> None:
    """A Job that reports nothing about a drafter has failed for it."""
    world = started(draftPool=[PLD, EAGLE])
    job = world.jobs()[0]
    world.measure(job)
    message = world.job_pods[job]["status"]["containerStatuses"][0]["state"]["terminated"]
    document = json.loads(message["message"])
    document["drafters"] = [d for d in document["drafters"] if d["name"] != "eagle"]
    message["message"] = json.dumps(document)
    world.settle()
    assert world.reason(C.PROFILES_READY) == "False/Failed"
    assert world.jobs() == []


def test_a_result_for_another_key_is_not_stored() -> None:
    """A Job of an older release, or a broken one, must not poison the profile."""
    world = started()
    job = world.jobs()[0]
    world.measure(job)
    ended = world.job_pods[job]["status"]["containerStatuses"][0]["state"]["terminated"]
    ended["message"] = ended["message"].replace(world.created_jobs[0].keys.target, "0123456789")
    world.settle()
    assert world.reason(C.PROFILES_READY) == "False/Failed"


def test_a_job_stopped_by_its_deadline_says_so() -> None:
    """A hanging Job: the kubelet ends the pod after profiling.timeout."""
    world = started()
    job = world.jobs()[0]
    world.finish_job(job, "waiting for the engine", exit_code=137)
    world.job_pods[job]["status"]["reason"] = "DeadlineExceeded"
    world.settle()
    assert "longer than profiling.timeout" in world.condition(C.PROFILES_READY).message


@pytest.mark.parametrize("spec", [{"profiling": {"mode": "Skip"}}, {"paused": True}])
def test_skip_and_paused_measure_nothing(spec: dict[str, Any]) -> None:
    """Pods learn online, and the condition says so."""
    world = started(**spec)
    assert world.jobs() == []
    assert world.reason(C.PROFILES_READY) == "False/Learning"


def test_job_is_replaced_if_settings_change_before_it_starts() -> None:
    """A Job that waits for a node under a wrong toleration would wait for ever."""
    world = started()
    first = world.objects[JOB, world.jobs()[0]]["metadata"]["uid"]
    world.change(accelerator={"products": ["cpu"], "tolerations": [{"operator": "Exists"}]})
    world.replace_pods()
    assert [world.objects[JOB, job]["metadata"]["uid"] for job in world.jobs()] != [first]
    assert len(world.created_jobs) == 2


def test_pod_template_labels_and_annotations_reach_job_and_pod() -> None:
    """Queues (Kueue) go by the Job's labels, meshes and policies by the pod's; ours cannot be replaced."""
    mine = {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}, "annotations": {"sidecar.istio.io/inject": "false"}}
    world = started(podTemplate=mine)
    job = world.objects[JOB, world.jobs()[0]]
    for metadata in (job["metadata"], job["spec"]["template"]["metadata"]):
        assert mine["labels"].items() <= metadata["labels"].items()
        assert mine["annotations"].items() <= metadata["annotations"].items()
        assert metadata["labels"]["outrider.dev/component"] == "profiling"


@pytest.mark.parametrize("costs", [{}, {"uniform": {}}], ids=["none", "zero"])
def test_job_that_reports_free_steps_fails_and_service_continues(costs: dict[str, Any]) -> None:
    """It ended every look at the service: a free step is infinitely slower with any draft."""
    world = started(draftPool=[SPARSE])
    request = request_of(world.objects[JOB, world.jobs()[0]])
    assert request is not None
    said = json.loads(result(request, rfc3339(world.now)).model_dump_json(by_alias=True))
    said["target"]["costs"] = costs
    world.finish_job(world.jobs()[0], json.dumps(said))
    world.settle()
    assert "target.costs" in world.condition(C.PROFILES_READY).message
    world.change(replicas=3)
    assert world.deployment()["spec"]["replicas"] == 3


@pytest.mark.parametrize(("message", "exit_code"), [("", 0), ("no memory", 137)])
def test_profiler_with_a_sidecar_is_believed_and_goes(message: str, exit_code: int) -> None:
    """An ordinary sidecar kept the Job "measuring" until its deadline."""
    world = started()
    (job,) = world.jobs()
    if exit_code:
        world.finish_job(job, message, exit_code=exit_code, reason="OOMKilled")
    else:
        world.measure(job)
    world.join_sidecar(job)
    world.settle()
    assert world.jobs() == []
    assert world.reason(C.PROFILES_READY) == ("False/Failed" if exit_code else "True/Profiled")


def blip(world: World) -> None:
    """The Job's pod is refused by its node, before the profiler runs."""
    (job,) = world.jobs()
    world.finish_job(job, "", exit_code=1)
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no GPU is free"}
    world.job_pods[job]["status"] = status
    world.settle()


def test_job_that_ended_by_a_blip_is_tried_again() -> None:
    """A node that refused the pod left the service without a profile until someone annotated it."""
    world = started()
    for tries in range(3):
        blip(world)
        assert world.jobs() == []
        message = world.condition(C.PROFILES_READY).message
        assert "no GPU is free. It is tried again by itself" in message
        plan = world.settle()
        assert plan.requeue_after_s is not None
        assert plan.requeue_after_s <= FIRST_RETRY_S * 2**tries
        world.now += FIRST_RETRY_S * 2**tries - 60
        world.settle()
        assert world.jobs() == []
        world.now += 120
        world.settle()
    world.profile(world.jobs()[0])
    assert world.reason(C.PROFILES_READY) == "True/Profiled"


def test_hub_that_was_away_is_no_verdict_on_a_model() -> None:
    world = started(draftPool=[PLD, EAGLE])
    world.profile(world.jobs()[0], failing={"eagle": "HubUnavailable"})
    assert world.jobs() == []
    world.now += FIRST_RETRY_S + 1
    world.settle()
    assert world.created_jobs[-1].drafters == ("eagle",)
