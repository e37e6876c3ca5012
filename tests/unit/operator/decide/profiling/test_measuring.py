"""Profiling Jobs and profiles: failures, sharing, age."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from outrider_crds.profile import ExecutionMode, ProfilingResult, StepCost
from outrider_crds.spec import SparseSelf, Speculation
from outrider_crds.status import ConditionType as C
from outrider_operator.decide import decide
from outrider_operator.decide.ownership import owner_uids
from outrider_operator.decide.profile_store import Failure, Store, read_store, store_data
from outrider_operator.decide.profiling.asked import asked_of
from outrider_operator.decide.profiling.sharing import MOST_OWNERS
from outrider_operator.model import CONFIG_MAP, JOB, Object
from outrider_runtime.profiler.report import as_json
from outrider_runtime.profiler.run import Profile

from tests.unit.operator.decide.world import EAGLE, PLD, World, manifest, result, rfc3339, started

SPARSE = {"name": "self", "method": "SparseSelf", "sparseSelf": {}}


@pytest.mark.parametrize(
    ("message", "exit_code"),
    [("Traceback ...\nRuntimeError: no such model /models/x", 1), ("hello", 0), ("", 137), ('{"target": 3}', 0)],
)
def test_a_job_that_dies_or_prints_nonsense_is_a_condition_with_its_last_lines(message: str, exit_code: int) -> None:
    """Failure is a condition in the pod's own words; the Job goes, and the key is not tried again."""
    world = started()
    world.finish_job(world.jobs()[0], message, exit_code=exit_code, reason="Error")
    world.settle()
    found = world.condition(C.PROFILES_READY)
    assert (found.status, found.reason) == ("False", "Failed")
    assert message.split("\n")[-1] in found.message
    assert "outrider.dev/reprofile" in found.message
    assert world.jobs() == []
    world.now += 3600
    world.settle()
    assert len(world.created_jobs) == 1
    profile = world.observed().status.profiles[0]
    assert (profile.failed_key, profile.config_map) == (world.created_jobs[0].keys.target, "")


def test_a_result_that_cannot_be_read_says_where() -> None:
    """The condition showed nothing but the whole document."""
    world = started()
    asked = asked_of(world.objects[JOB, world.jobs()[0]])
    assert asked is not None
    moment = rfc3339(world.now)
    world.finish_job(world.jobs()[0], result(asked, moment).model_dump_json(by_alias=True).replace(moment, "soon"))
    world.settle()
    assert "target.measuredAt" in world.condition(C.PROFILES_READY).message


def test_a_failed_key_runs_again_on_a_changed_spec_or_on_request() -> None:
    """A longer timeout, or a new value of the annotation; the same value asks once."""
    world = started()
    world.finish_job(world.jobs()[0], "no", exit_code=1)
    world.settle()
    world.patch(profiling={"timeout": "2h"})
    world.settle()
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
    world = World(manifest())
    world.serve()
    world.services["chat"]["metadata"]["annotations"] = {"outrider.dev/reprofile": "2026-12-01"}
    world.settle()
    assert world.created_jobs[-1].target
    assert world.reason(C.PROFILES_READY) == "True/Profiled"
    world.now += 60
    world.measure(world.jobs()[0])
    world.settle()
    assert len(world.created_jobs) == 2
    assert world.observed().status.profiles[0].profiled_at == rfc3339(world.now)


def test_a_job_is_deleted_as_it_was_seen() -> None:
    """A result that came meanwhile went with it."""
    world = World(manifest())
    world.settle()
    world.roll_out()
    world.report_states()
    world.settle()
    (name,) = world.jobs()
    world.patch(profiling={"mode": "Skip"})
    (deletion,) = decide(world.observed(), world.settings).delete
    assert (deletion.kind, deletion.name) == (JOB, name)
    assert deletion.resource_version == world.objects[JOB, name]["metadata"]["resourceVersion"]


def test_a_draft_of_another_vocabulary_is_named_and_the_rest_is_used() -> None:
    """VocabularyMismatch names the drafter; target and prompt lookup are stored."""
    world = started(draftPool=[PLD, EAGLE])
    world.measure(world.jobs()[0], failing={"eagle": "VocabularyMismatch"})
    world.settle()
    found = world.condition(C.PROFILES_READY)
    assert (found.status, found.reason) == ("False", "VocabularyMismatch")
    assert "eagle" in found.message
    assert [(d.name, d.profiled) for d in world.observed().status.drafts] == [("pld", True), ("eagle", False)]
    assert world.observed().status.drafts[1].reason


def test_a_key_that_the_result_does_not_mention_is_not_tried_for_ever() -> None:
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


def test_an_old_profile_is_stale_and_serves_while_it_is_measured_again() -> None:
    """profiling.maxAge: nothing wakes the operator but its own clock."""
    world = World(manifest(profiling={"maxAge": "24h"}))
    plan = world.serve()
    assert plan.requeue_after_s == pytest.approx(24 * 3600)
    world.now += 24 * 3600
    world.settle()
    assert world.reason(C.PROFILES_READY) == "False/Stale"
    assert world.observed().status.profiles[0].stale
    world.measure(world.jobs()[0])
    world.settle()
    assert world.reason(C.PROFILES_READY) == "True/Profiled"


def test_a_profile_from_another_device_is_marked_stale() -> None:
    """The runtime compares device, engine and commit with its own and reports the difference."""
    world = World(manifest())
    world.serve()
    key = world.created_jobs[0].keys.target
    world.report_states(profile={"mismatch": "The profile is of an A100, this is an L4", "targetKey": key})
    world.settle()
    assert world.reason(C.PROFILES_READY) == "False/Stale"
    assert "A100" in world.condition(C.PROFILES_READY).message


def test_a_profile_that_fits_some_of_the_pods_is_not_stale() -> None:
    """`cpu` is every model of CPU: where nodes differ no one measurement fits all pods, and measuring again changes
    nothing. Those that it does not fit correct it online."""
    world = World(manifest(replicas=2))
    world.serve()
    key = world.created_jobs[0].keys.target
    world.report_states(profile={"targetKey": key})
    other = next(iter(world.states))
    mismatch = {"mismatch": "The profile is of an EPYC 9654, this is a Xeon 8481C", "targetKey": key}
    world.states[other] = world.states[other].model_validate({**world.states[other].wire(), "profile": mismatch})
    world.settle()
    assert world.reason(C.PROFILES_READY) == "True/Profiled"


def test_two_services_share_one_measurement_and_the_last_one_takes_it_along() -> None:
    """One Job, one ConfigMap with an owner reference of each; leaving removes only one's own."""
    world = World(manifest("one"), manifest("two"))
    for name in ("one", "two"):
        world.settle(name)
        world.roll_out(name)
    world.settle("one")
    world.settle("two")
    assert len(world.created_jobs) == 1
    world.measure(world.jobs()[0])
    for name in ("one", "two", "one"):
        world.settle(name)
    assert world.jobs() == []
    profile = next(d for (k, n), d in world.objects.items() if k == CONFIG_MAP and n.startswith("outrider-profile"))
    assert {r["uid"] for r in profile["metadata"]["ownerReferences"]} == {"uid-one", "uid-two"}
    assert world.reason(C.PROFILES_READY, "two") == "True/Profiled"
    world.patch("one", target={"name": "org/other"})
    leave(world, "one")
    assert [r["uid"] for r in profile["metadata"]["ownerReferences"]] == ["uid-two"]
    world.patch("two", target={"name": "org/other"})
    leave(world, "two")
    assert not any(d is profile for d in world.objects.values())


def test_a_profile_with_as_many_owners_as_it_may_have_is_used_all_the_same() -> None:
    """From the 204th service on, a profile was too large for the operator, and nobody had one any more."""
    world = World(manifest())
    world.serve()
    profile = next(d for (k, n), d in world.objects.items() if k == CONFIG_MAP and n.startswith("outrider-profile"))
    others = [{"uid": f"other-{number}"} for number in range(MOST_OWNERS)]
    profile["metadata"]["ownerReferences"] = others
    world.settle()
    assert profile["metadata"]["ownerReferences"] == others
    assert world.reason(C.PROFILES_READY) == "True/Profiled"
    profile["metadata"]["ownerReferences"] = others[1:]
    world.settle()
    assert "uid-chat" in owner_uids(profile)


def test_two_services_that_leave_in_one_moment_take_their_profile_along() -> None:
    """Each took its own name off: what was left belonged to nobody, and no later service could make it anew."""
    world = World(manifest("one"), manifest("two"))
    for name in ("one", "two", "one", "two"):
        world.settle(name)
        world.roll_out(name)
    world.measure(world.jobs()[0])
    for name in ("one", "two", "one"):
        world.settle(name)
    for name in ("one", "two"):
        world.patch(name, target={"name": "org/other"})
        roll_over(world, name)
    plans = {name: decide(world.observed(name), world.settings) for name in ("one", "two")}
    assert all(len(plan.adopt) == 1 for plan in plans.values())
    for name, plan in plans.items():
        world.carry_out(plan, name)
    world.settle("two")
    world.settle("one")
    assert not any(name.startswith("outrider-profile") for kind, name in world.objects if kind == CONFIG_MAP)


def test_a_profile_without_an_owner_is_taken_by_the_service_that_needs_it() -> None:
    """Its last user was deleted with --cascade=orphan."""
    world = World(manifest())
    world.serve()
    profile = next(d for (k, n), d in world.objects.items() if k == CONFIG_MAP and n.startswith("outrider-profile"))
    profile["metadata"]["ownerReferences"] = []
    world.settle()
    assert [owner["uid"] for owner in profile["metadata"]["ownerReferences"]] == ["uid-chat"]


def leave(world: World, name: str) -> None:
    """The new revision is rolled out and no ReplicaSet of the old one is left."""
    roll_over(world, name)
    world.settle(name)


def roll_over(world: World, name: str) -> None:
    world.settle(name)
    world.replica_sets = {k: v for k, v in world.replica_sets.items() if not k.startswith(name)}
    world.roll_out(name)


def test_a_job_is_adopted_by_a_second_service_that_needs_it() -> None:
    """If the first one is deleted while it measures, the measurement goes on for the second."""
    world = World(manifest("one"), manifest("two"))
    for name in ("one", "two"):
        world.settle(name)
        world.roll_out(name)
    world.settle("one")
    world.settle("two")
    owners = world.objects[JOB, world.jobs()[0]]["metadata"]["ownerReferences"]
    assert [o["uid"] for o in owners] == ["uid-one", "uid-two"]


def test_a_job_that_nobody_wants_any_more_is_stopped() -> None:
    """A changed target frees the accelerator, but not while another service still needs the measurement."""
    world = World(manifest("one"), manifest("two"))
    for name in ("one", "two"):
        world.settle(name)
        world.roll_out(name)
    world.settle("one")
    world.settle("two")
    (shared,) = world.jobs()
    ownerless = copy.deepcopy(world.objects[JOB, shared])
    world.patch("one", target={"name": "org/other"})
    world.settle("one")
    assert [o["uid"] for o in world.objects[JOB, shared]["metadata"]["ownerReferences"]] == ["uid-two"]
    world.patch("two", target={"name": "org/other"})
    world.settle("two")
    assert shared not in world.jobs()
    ownerless["metadata"]["ownerReferences"] = []
    world.objects[JOB, shared] = ownerless
    foreign = copy.deepcopy(ownerless)
    foreign["metadata"] |= {"name": "copied", "annotations": {}}
    world.objects[JOB, "copied"] = foreign
    world.settle("one")
    assert shared not in world.jobs()
    assert "copied" in world.jobs(), "labels alone make nothing Outrider's"


def test_an_old_drafter_of_someone_else_does_not_make_a_profile_stale() -> None:
    """A profile keeps drafters that were measured for others, or before; only those of the spec count."""
    world = World(manifest(draftPool=[PLD, EAGLE], profiling={"maxAge": "24h"}))
    world.serve()
    world.now += 20 * 3600
    world.services["chat"]["metadata"]["annotations"] = {"outrider.dev/reprofile": "a"}
    world.patch(draftPool=[PLD])
    world.settle()
    world.roll_out()
    world.settle()
    world.measure(world.jobs()[0])
    world.settle()
    world.now += 6 * 3600
    world.settle()
    assert world.reason(C.PROFILES_READY) == "True/Profiled"


@pytest.mark.parametrize("spec", [{"profiling": {"mode": "Skip"}}, {"paused": True}])
def test_skip_and_paused_measure_nothing(spec: dict[str, Any]) -> None:
    """Pods learn online, and the condition says so."""
    world = started(**spec)
    assert world.jobs() == []
    assert world.reason(C.PROFILES_READY) == "False/Learning"


def test_a_noisy_profile_is_used_and_named() -> None:
    """Noisy: the spread of one shape says that the machine was busy."""
    world = started()
    world.measure(world.jobs()[0], spread_percent=60.0)
    world.settle()
    assert world.reason(C.PROFILES_READY) == "False/Noisy"


def test_a_profile_that_someone_broke_is_measured_again() -> None:
    """Children changed by hand come back."""
    world = World(manifest())
    world.serve()
    name = next(n for k, n in world.objects if n.startswith("outrider-profile"))
    world.objects[CONFIG_MAP, name]["data"] = {"target.json": "{", "x": "1"}
    world.settle()
    assert len(world.created_jobs) == 2


def test_a_job_whose_settings_were_corrected_before_it_could_start_is_replaced() -> None:
    """A Job that waits for a node under a wrong toleration would wait for ever."""
    world = started()
    first = world.objects[JOB, world.jobs()[0]]["metadata"]["uid"]
    world.patch(accelerator={"products": ["cpu"], "tolerations": [{"operator": "Exists"}]})
    world.settle()
    world.roll_out()
    world.settle()
    assert [world.objects[JOB, job]["metadata"]["uid"] for job in world.jobs()] != [first]
    assert len(world.created_jobs) == 2


def test_labels_and_annotations_of_the_pod_template_reach_the_job_and_its_pod() -> None:
    """Queues (Kueue) go by the Job's labels, meshes and policies by the pod's; ours cannot be replaced."""
    mine = {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}, "annotations": {"sidecar.istio.io/inject": "false"}}
    world = World(manifest(podTemplate=mine))
    world.settle()
    world.roll_out()
    world.settle()
    job = world.objects[JOB, world.jobs()[0]]
    for metadata in (job["metadata"], job["spec"]["template"]["metadata"]):
        assert mine["labels"].items() <= metadata["labels"].items()
        assert mine["annotations"].items() <= metadata["annotations"].items()
        assert metadata["labels"]["outrider.dev/component"] == "profiling"


def test_where_a_self_drafting_target_pays_is_in_the_status() -> None:
    """Break-even contexts by batch size, from the profile's own costs."""
    world = World(manifest())
    world.patch(draftPool=[SPARSE])
    world.serve()
    (found,) = world.observed().status.profiles[0].long_contexts
    assert found.drafter == "self"
    assert [one.requests for one in found.break_even] == [1, 4, 16, 64]


def test_the_status_says_of_long_contexts_what_the_report_says() -> None:
    """They counted a window's pages each in their own way."""
    world = started(draftPool=[SPARSE])
    asked = asked_of(world.objects[JOB, world.jobs()[0]])
    assert asked is not None
    said = result(asked, rfc3339(world.now))
    step = StepCost(per_context_token_s=1e-6, per_batched_token_s=2e-5, constant_s=0.01)
    told = {"most_requests": 32, "request_tokens": 131072, "kv_tokens": 10**6, "costs": {ExecutionMode.UNIFORM: step}}
    target = said.target.model_copy(update=told) if said.target is not None else None
    draft = said.drafters[0].model_copy(update={"cost": step, "budget_tokens": 1040, "most_requests": 32})
    world.finish_job(world.jobs()[0], ProfilingResult(target=target, drafters=[draft]).model_dump_json(by_alias=True))
    world.settle()
    (found,) = world.observed().status.profiles[0].long_contexts
    blocks = {"self": (SparseSelf(), Speculation().max_draft_tokens)}
    report = as_json(Profile(target, [draft], self_drafting=blocks))["longContexts"]["self"]
    assert {str(one.requests): one.context_tokens for one in found.break_even} == report["breakEvenTokens"]
    assert report["breakEvenTokens"].keys() == {"1", "4", "16"}
    assert found.inflection_tokens == report["inflectionTokens"]


@pytest.mark.parametrize("costs", [{}, {"uniform": {}}], ids=["none", "zero"])
def test_a_job_that_says_that_steps_are_free_fails_and_its_service_goes_on(costs: dict[str, Any]) -> None:
    """It ended every look at the service: a free step is infinitely slower with any draft."""
    world = started(draftPool=[SPARSE])
    asked = asked_of(world.objects[JOB, world.jobs()[0]])
    assert asked is not None
    said = json.loads(result(asked, rfc3339(world.now)).model_dump_json(by_alias=True))
    said["target"]["costs"] = costs
    world.finish_job(world.jobs()[0], json.dumps(said))
    world.settle()
    assert "target.costs" in world.condition(C.PROFILES_READY).message
    world.patch(replicas=3)
    world.settle()
    assert world.deployment()["spec"]["replicas"] == 3


def test_a_profile_that_says_that_steps_are_free_is_measured_again() -> None:
    """Whoever edits it by hand, or an older release: what cannot be is as good as not measured."""
    world = started(draftPool=[SPARSE])
    world.measure(world.jobs()[0])
    world.settle()
    stored = world.objects[CONFIG_MAP, world.observed().status.profiles[0].config_map]["data"]
    stored["target.json"] = json.dumps({**json.loads(stored["target.json"]), "costs": {"uniform": {}}})
    world.settle()
    assert len(world.created_jobs) == 2


def test_a_foreign_file_in_a_profile_does_not_keep_new_results_out() -> None:
    """Its key went into the name of a file, which the API server refused at every attempt to store anything."""
    world = World(manifest())
    world.serve()
    data = world.objects[CONFIG_MAP, world.observed().status.profiles[0].config_map]["data"]
    (own,) = [file for file in data if file != "target.json"]
    evil = {**json.loads(data[own]), "key": "../x y"}
    data.update({"evil.json": json.dumps(evil), "abc.json": json.dumps(evil), "notes.txt": "mine"})
    world.services["chat"]["metadata"]["annotations"] = {"outrider.dev/reprofile": "again"}
    world.settle()
    (job,) = world.jobs()
    world.measure(job)
    world.settle()
    stored = world.objects[CONFIG_MAP, world.observed().status.profiles[0].config_map]["data"]
    assert stored.keys() == {"target.json", own}
    assert world.jobs() == []


def test_a_profile_is_read_once_in_a_decision_and_never_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 kB of failures each was read anew wherever the profile was asked for: a third of a second for a look, in
    which all other services waited."""
    world = World(manifest())
    world.serve()
    data = world.objects[CONFIG_MAP, world.observed().status.profiles[0].config_map]["data"]
    failure = {"reason": "", "message": "", "job": ""}
    data["failures.json"] = json.dumps({str(n): {"": failure} for n in range(4000)})
    reads: list[Store] = []

    def noting(document: Object | None) -> Store:
        reads.append(read_store(document))
        return reads[-1]

    monkeypatch.setattr("outrider_operator.decide.profile_store.read_store", noting)
    decide(world.observed(), world.settings)
    assert len(reads) == 1
    assert len(reads[0].failures) < 100


def test_the_newest_failures_of_a_shared_profile_are_kept() -> None:
    store = Store()
    for n in range(200):
        store = store.with_failure(f"key{n}", "attempt", Failure(reason="Failed", message="no", job="uid"))
    store = store.with_failure("key150", "attempt", Failure(reason="Failed", message="again", job="uid"))
    kept = read_store({"data": store_data(store)})
    assert kept == store
    assert list(kept.failures)[-2:] == ["key199", "key150"]
    assert "key0" not in kept.failures
