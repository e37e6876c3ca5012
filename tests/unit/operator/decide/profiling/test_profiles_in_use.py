"""Which profiles serve, which are stale, and what the status says of them."""

from __future__ import annotations

import json

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_crds.draft_pool import SparseSelf
from outrider_crds.profile import ProfileExecutionMode, ProfileStepCost, ProfilingResult
from outrider_crds.spec import Speculation
from outrider_operator.cluster_model import CONFIG_MAP, JOB, Object
from outrider_operator.decide import decide
from outrider_operator.decide.desired.profile_store import Store, read_store
from outrider_operator.decide.profiling.measurement_request import request_of
from outrider_runtime.profiler.profile_report import as_json
from outrider_runtime.profiler.run import Profile

from tests.unit.operator.decide.world import EAGLE, PLD, World, manifest, result, rfc3339, started

SPARSE = {"name": "self", "method": "SparseSelf", "sparseSelf": {}}


def test_stale_profile_serves_while_it_is_measured_again() -> None:
    """profiling.maxAge: nothing wakes the operator but its own clock."""
    world = World(manifest(profiling={"maxAge": "24h"}))
    plan = world.serve()
    assert plan.requeue_after_s == pytest.approx(24 * 3600)
    world.now += 24 * 3600
    world.settle()
    assert world.reason(C.PROFILES_READY) == "False/Stale"
    assert world.observed().status.profiles[0].stale
    world.profile(world.jobs()[0])
    assert world.reason(C.PROFILES_READY) == "True/Profiled"


def test_a_profile_from_another_device_is_marked_stale() -> None:
    """The runtime compares device, engine and commit with its own and reports the difference."""
    world = World(manifest()).served()
    key = world.created_jobs[0].keys.target
    world.report(profile={"mismatch": "The profile is of an A100, this is an L4", "targetKey": key})
    assert world.reason(C.PROFILES_READY) == "False/Stale"
    assert "A100" in world.condition(C.PROFILES_READY).message


def test_a_profile_that_fits_some_of_the_pods_is_not_stale() -> None:
    """`cpu` is every model of CPU: where nodes differ no one measurement fits all pods, and measuring again changes
    nothing. Those that it does not fit correct it online."""
    world = World(manifest(replicas=2)).served()
    key = world.created_jobs[0].keys.target
    world.report_states(profile={"targetKey": key})
    other = next(iter(world.states))
    mismatch = {"mismatch": "The profile is of an EPYC 9654, this is a Xeon 8481C", "targetKey": key}
    world.states[other] = world.states[other].model_validate({**world.states[other].wire(), "profile": mismatch})
    world.settle()
    assert world.reason(C.PROFILES_READY) == "True/Profiled"


def test_old_drafter_of_another_service_leaves_profile_fresh() -> None:
    """A profile keeps drafters that were measured for others, or before; only those of the spec count."""
    world = World(manifest(draftPool=[PLD, EAGLE], profiling={"maxAge": "24h"})).served()
    world.now += 20 * 3600
    world.services["chat"]["metadata"]["annotations"] = {"outrider.dev/reprofile": "a"}
    world.change(draftPool=[PLD])
    world.replace_pods()
    world.profile(world.jobs()[0])
    world.now += 6 * 3600
    world.settle()
    assert world.reason(C.PROFILES_READY) == "True/Profiled"


def test_a_noisy_profile_is_used_and_named() -> None:
    """Noisy: the spread of one shape says that the machine was busy."""
    world = started()
    world.profile(world.jobs()[0], spread_percent=60.0)
    assert world.reason(C.PROFILES_READY) == "False/Noisy"


@pytest.mark.parametrize("target", ["{", '{"costs": {"uniform": {}}}'], ids=["no JSON", "free steps"])
def test_profile_that_cannot_be_is_measured_again(target: str) -> None:
    """Users or an older release may write nonsense: an impossible measurement counts as missing."""
    world = World(manifest()).served()
    stored = world.objects[CONFIG_MAP, world.observed().status.profiles[0].config_map]["data"]
    whole = {**json.loads(stored["target.json"]), **json.loads(target)} if target != "{" else target
    stored["target.json"] = whole if isinstance(whole, str) else json.dumps(whole)
    world.settle()
    assert len(world.created_jobs) == 2


def test_where_a_self_drafting_target_pays_is_in_the_status() -> None:
    """Break-even contexts by batch size, from the profile's own costs."""
    world = World(manifest())
    world.patch(draftPool=[SPARSE])
    world.serve()
    (status,) = world.observed().status.profiles[0].long_contexts
    assert status.drafter == "self"
    assert [entry.requests for entry in status.break_even] == [1, 4, 16, 64]


def test_the_status_says_of_long_contexts_what_the_report_says() -> None:
    """They counted a window's pages each in their own way."""
    world = started(draftPool=[SPARSE])
    request = request_of(world.objects[JOB, world.jobs()[0]])
    assert request is not None
    said = result(request, rfc3339(world.now))
    step = ProfileStepCost(per_context_token_s=1e-6, per_batched_token_s=2e-5, constant_s=0.01)
    fields = {
        "most_requests": 32,
        "request_tokens": 131072,
        "kv_tokens": 10**6,
        "costs": {ProfileExecutionMode.UNIFORM: step},
    }
    target = said.target.model_copy(update=fields) if said.target is not None else None
    draft = said.drafters[0].model_copy(update={"cost": step, "budget_tokens": 1040, "most_requests": 32})
    world.finish_job(world.jobs()[0], ProfilingResult(target=target, drafters=[draft]).model_dump_json(by_alias=True))
    world.settle()
    (status,) = world.observed().status.profiles[0].long_contexts
    blocks = {"self": (SparseSelf(), Speculation().max_draft_tokens)}
    report = as_json(Profile(target, [draft], self_drafting=blocks))["longContexts"]["self"]
    assert {str(entry.requests): entry.context_tokens for entry in status.break_even} == report["breakEvenTokens"]
    assert report["breakEvenTokens"].keys() == {"1", "4", "16"}
    assert status.inflection_tokens == report["inflectionTokens"]


def test_foreign_file_in_a_profile_does_not_block_new_results() -> None:
    """Its key went into the name of a file, which the API server refused at every attempt to store anything."""
    world = World(manifest()).served()
    data = world.objects[CONFIG_MAP, world.observed().status.profiles[0].config_map]["data"]
    (own,) = [file for file in data if file != "target.json"]
    evil = {**json.loads(data[own]), "key": "../x y"}
    data.update({"evil.json": json.dumps(evil), "abc.json": json.dumps(evil), "notes.txt": "mine"})
    world.services["chat"]["metadata"]["annotations"] = {"outrider.dev/reprofile": "again"}
    world.settle()
    (job,) = world.jobs()
    world.profile(job)
    stored = world.objects[CONFIG_MAP, world.observed().status.profiles[0].config_map]["data"]
    assert stored.keys() == {"target.json", own}
    assert world.jobs() == []


def test_profile_is_parsed_once_per_decision_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile with 200 kB of failures was parsed at each use: a third of a second per reconcile, in which all other
    services waited."""
    world = World(manifest()).served()
    data = world.objects[CONFIG_MAP, world.observed().status.profiles[0].config_map]["data"]
    failure = {"reason": "", "message": "", "job": ""}
    data["failures.json"] = json.dumps({str(n): {"": failure} for n in range(4000)})
    reads: list[Store] = []

    def noting(document: Object | None) -> Store:
        reads.append(read_store(document))
        return reads[-1]

    monkeypatch.setattr("outrider_operator.decide.desired.profile_store.read_store", noting)
    decide(world.observed(), world.settings)
    assert len(reads) == 1
    assert len(reads[0].failures) < 100
