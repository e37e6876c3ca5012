"""What holds whatever the cluster looks like."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outrider_crds.conditions import ConditionReason, ConditionStatus, ConditionType
from outrider_crds.status import SpeculativeServiceStatus
from outrider_operator.cluster_model import DEPLOYMENT, JOB, Object, Observed
from outrider_operator.decide import decide
from outrider_operator.decide.profiling.measurement_request import request_of
from outrider_operator.plan import Plan

from tests.unit.operator.decide.canary.canary_world import CanaryWorld
from tests.unit.operator.decide.workloads.existing_world import ExistingWorld
from tests.unit.operator.decide.world import (
    EAGLE,
    PLD,
    SETTINGS,
    World,
    find,
    gpu_node,
    manifest,
    result,
    rfc3339,
    started,
    unschedulable,
)

C, R = ConditionType, ConditionReason
_REJECTED = {
    R.INVALID_SPEC, R.NAME_CONFLICT, R.HOST_PATH_FORBIDDEN, R.PROMETHEUS_NOT_CONFIGURED, R.NOT_INSTALLED,
    R.CHILD_REJECTED,
}  # fmt: skip
_POD = {R.SCALED_TO_ZERO, R.IMAGE_PULL_FAILED, R.POD_CRASHING, R.POD_CANNOT_START, R.POD_ENDED}
_MEASURE = {R.NO_TRAFFIC, R.MEASURING, R.METRICS_UNAVAILABLE}
_EXISTING = {R.NO_POD_SELECTED, R.POD_SHARED, R.NOT_ACTIVE, R.RESTART_NEEDED}
_CANARY = {R.CANARY_FAILED, R.CANARY_ERROR, R.CANARY_INCONCLUSIVE}
REASONS: dict[ConditionType, set[ConditionReason]] = {
    C.SPEC_VALID: {R.ACCEPTED, *_REJECTED},
    C.PROFILES_READY: {
        *(R.PROFILED, R.LEARNING, R.PROFILING, R.PROFILE_FAILED, R.NOISY, R.STALE, R.NO_MATCHING_NODE),
        *(R.VOCABULARY_MISMATCH, R.WAITING_FOR_SERVING_POD, R.CHILD_REJECTED),
    },
    C.AVAILABLE: {R.ENOUGH_READY_PODS, R.TOO_FEW_READY_PODS, R.NO_POD_SELECTED, *_POD},
    C.UPDATED: {R.UP_TO_DATE, R.ROLLING_OUT, R.CONFIG_PENDING, R.WAITING_FOR_PROFILE, R.PAUSED, *_REJECTED}
    | {R.DRAFTER_NOT_LOADED, R.CANARY_RUNNING, R.WAITING_FOR_MODELS, *_CANARY, *_EXISTING},
    C.PROGRESSING: {R.ROLLING_OUT, R.COMPLETE, R.STALLED, R.NO_CAPACITY, R.PAUSED, R.WAITING_FOR_PROFILE}
    | {R.DRAFTER_NOT_LOADED, R.CANARY_STARTING, R.CANARY_MEASURING, R.WAITING_FOR_MODELS, *_CANARY, *_EXISTING},
    C.READY: {R.ENDPOINT_READY, R.NO_READY_ENDPOINT, *_POD},
    C.SPECULATION_ACTIVE: {R.PAYS, R.NOT_WORTH_IT, R.MEASURED_SLOWER, R.OFF, R.NO_DRAFTER, *_MEASURE},
    C.GOODPUT_HEALTHY: {R.GOODPUT_AS_PREDICTED, R.BELOW_BASELINE, *_MEASURE},
    C.SLO_ATTAINED: {R.ATTAINED, R.MISSED, R.INFEASIBLE, R.NO_SLO_CLASSES, R.NO_TRAFFIC, R.METRICS_UNAVAILABLE},
    C.INFERENCE_POOL_READY: {R.POOL_CURRENT, R.NAME_CONFLICT, R.NOT_INSTALLED, R.CHILD_REJECTED, R.NOT_REQUESTED}
    | {R.NOT_ATTACHED, R.NOT_ACCEPTED},
    C.ADAPTERS_LOADED: {R.ALL_LOADED, R.NOT_LOADED, R.LOADING, R.NO_ADAPTERS},
    C.RECONCILING: {R.RECONCILED, R.STALLED, R.ROLLING_OUT, R.CONFIG_PENDING, R.WAITING_FOR_PROFILE, R.PAUSED}
    | {R.WAITING_FOR_MODELS, R.DRAFTER_NOT_LOADED, R.CANARY_RUNNING, R.TOO_FEW_READY_PODS, *_POD} - {R.SCALED_TO_ZERO}
    | {R.NO_POD_SELECTED},
    C.STALLED: {R.NOT_STALLED, R.STALLED, R.NO_CAPACITY, R.DRAFTER_NOT_LOADED, *_REJECTED}
    | {R.PROFILE_FAILED, R.NOISY, R.NO_MATCHING_NODE, R.VOCABULARY_MISMATCH, *_CANARY, *_EXISTING}
    - {R.NO_POD_SELECTED},
}


def assert_sound(plan: Plan, observed: Observed, forged: str = "") -> None:
    """Promises to users that no state of the cluster may break. A ConfigMap called `forged` is not Outrider's work."""
    assert [c.type for c in plan.status.conditions] == list(ConditionType)
    for condition in plan.status.conditions:
        assert condition.reason in REASONS[condition.type] | {R.PENDING}, condition
        if condition.status is ConditionStatus.FALSE:
            assert condition.message, f"{condition.type}={condition.reason} must say what to do"
    assert plan.requeue_after_s is None or plan.requeue_after_s > 0
    assert_keeps_pods(plan, observed, forged)


def assert_keeps_pods(plan: Plan, observed: Observed, forged: str = "") -> None:
    """Ready pods of all revisions >= replicas - maxUnavailable: only the Deployment removes pods, under the
    service's own numbers, and what its pods mount is not deleted under them."""
    spec = observed.service["spec"]
    service = observed.identity.name
    for deployment in find(plan, DEPLOYMENT, lambda document: document["metadata"]["name"] == service):
        rolling = deployment["spec"]["strategy"]["rollingUpdate"]
        assert deployment["spec"]["replicas"] == spec.get("replicas", 1)
        assert rolling["maxUnavailable"] == spec.get("rollout", {}).get("maxUnavailable", 0)
        assert_can_start(deployment, observed)
    mounted = {
        volume.get("configMap", {}).get("name")
        for pod in observed.pods
        for volume in pod["spec"].get("volumes", [])
        if isinstance(volume, dict) and isinstance(volume.get("configMap"), dict)
    }
    for delete in plan.delete:
        is_canary = (delete.kind, delete.name) == (DEPLOYMENT, f"{service}-canary")
        assert is_canary or delete.kind in ("ConfigMap", JOB)
        assert delete.kind == JOB or delete.name not in mounted - {forged}


def assert_can_start(deployment: Object, observed: Observed) -> None:
    """What the pods of `deployment` mount of Outrider's is there, profiles aside, which may come later."""
    pod = deployment["spec"]["template"]["spec"]
    assert ("ServiceAccount", pod["serviceAccountName"]) in observed.children
    for volume in pod["volumes"]:
        source = volume.get("configMap", {"optional": True})
        assert source.get("optional") or ("ConfigMap", source["name"]) in observed.children


def early() -> World:
    world = World(manifest())
    world.reconcile()
    return world


def served() -> World:
    return World(manifest(draftPool=[PLD, EAGLE])).served()


def rolling_out() -> World:
    world = served()
    world.change(engine={"maxModelLen": 128}, draftPool=[PLD], replicas=2)
    unschedulable(world, "new", world.now - 90)
    return world


def profiling() -> World:
    products = ["NVIDIA-H200", "NVIDIA-L4"]
    world = World(
        manifest(accelerator={"products": products}, profiling={"maxAge": "1h"}),
        nodes=tuple(gpu_node(p, p) for p in products),
    ).settled()
    world.replace_pods()
    first, second = world.jobs()
    world.finish_job(first, "oh no", exit_code=1)
    world.measure(second)
    return world


def required() -> World:
    return World(manifest(profiling={"mode": "Required"})).settled()


def canary_measuring() -> World:
    world = CanaryWorld()
    world.patched()
    world.measure_arms(50)
    return world


def of_another_workload() -> World:
    return ExistingWorld(draftPool=[PLD, EAGLE])


WORLDS: list[Callable[[], World]] = [
    early, served, rolling_out, profiling, required, canary_measuring, of_another_workload,
]  # fmt: skip


@pytest.mark.parametrize("make", WORLDS)
def test_every_state_is_sound_and_comes_to_rest(make: Callable[[], World]) -> None:
    """Apply, decide again: after a few rounds there is nothing left to do."""
    world = make()
    for _ in range(6):
        observed = world.observed()
        plan = world.reconcile()
        assert_sound(plan, observed)
    assert plan.is_idle


JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 3),
    st.sampled_from(["", "x", "True", "2026-11-21T12:00:00Z", "Unschedulable", "{}"]),
    st.just([]),
    st.just({}),
    st.just([{}]),
    st.just([None]),
    st.just({"name": "runtime"}),
)


def paths(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside `document`, names and uids aside: those the API server vouches for."""
    paths_below = [path] if path else []
    children = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in children:
        if (*path, key)[-1] not in ("uid", "name", "metadata", "kind", "resourceVersion") or path[:1] == ("spec",):
            paths_below += paths(value, (*path, key))
        elif key == "metadata" and not path:
            paths_below += [("metadata", *rest) for rest in _metadata_paths(value)]
    return paths_below


def _metadata_paths(metadata: Object) -> list[tuple[Any, ...]]:
    fields = ("labels", "annotations", "ownerReferences", "deletionTimestamp")
    return [path for field in fields if field in metadata for path in paths({field: metadata[field]})]


def changed(document: Object, path: tuple[Any, ...], value: Any) -> Object:
    copied = copy.deepcopy(document)
    place: Any = copied
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copied


_PREPARED: dict[str, Observed] = {}


def prepared(make: Callable[[], World]) -> Observed:
    if make.__name__ not in _PREPARED:
        _PREPARED[make.__name__] = make().observed()
    return _PREPARED[make.__name__]


@given(data=st.data(), make=st.sampled_from(WORLDS))
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.slow
def test_no_state_of_a_child_stops_the_operator(data: st.DataObject, make: Callable[[], World]) -> None:
    """Anyone may edit a child; a field of a wrong type reads as absent and the plan stays sound."""
    observed = prepared(make)

    def broken(document: Object) -> Object:
        where = data.draw(st.sampled_from(paths(document)))
        return changed(document, where, data.draw(JSON))

    groups = ("replica_sets", "pods", "jobs", "job_pods", "children", "profiles")
    name = data.draw(st.sampled_from([g for g in groups if getattr(observed, g)]))
    group = getattr(observed, name)
    if isinstance(group, tuple):
        index = data.draw(st.integers(0, len(group) - 1))
        edited: Any = (*group[:index], broken(group[index]), *group[index + 1 :])
    else:
        key = data.draw(st.sampled_from(sorted(group)))
        edited = {**group, key: broken(group[key])}
    plan = decide(replace(observed, **{name: edited}), SETTINGS)
    assert [c.type for c in plan.status.conditions] == list(ConditionType)
    for delete in plan.delete:
        assert delete.kind in ("ConfigMap", JOB)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.one_of(
    st.binary(max_size=300).map(lambda raw: raw.decode(errors="replace")),
    ANYTHING.map(json.dumps),
    st.sampled_from(
        ["[" * 5000, '{"a":' * 5000, "1" * 5000, "null", '{"failures": [{"reason": "X", "message": "' + "y" * 5000]
    ),
)


def damaged(document: Object) -> st.SearchStrategy[str]:
    """`document` as JSON, with one field of it replaced by anything."""
    places = st.sampled_from(paths(document))
    return st.builds(lambda where, value: json.dumps(changed(document, where, value)), places, ANYTHING)


@cache
def measuring() -> tuple[World, Object]:
    """A service whose Job runs, and what the profiler would say."""
    world = started(draftPool=[PLD, EAGLE])
    request = request_of(world.objects[JOB, world.jobs()[0]])
    assert request is not None
    return world, json.loads(result(request, rfc3339(world.now)).model_dump_json(by_alias=True))


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.slow
def test_whatever_a_job_says_is_a_condition(data: st.DataObject) -> None:
    """A tenant's image writes the termination message, so it may have any bytes. The rest is reported."""
    prepared_world, said = measuring()
    world = copy.deepcopy(prepared_world)
    (job,) = world.jobs()
    world.finish_job(job, data.draw(WORDS | damaged(said)), exit_code=data.draw(st.sampled_from([0, 1])))
    world.change(replicas=2)
    assert world.deployment()["spec"]["replicas"] == 2
    assert world.jobs() == []
    assert world.condition(C.PROFILES_READY).message


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.slow
def test_whatever_stands_in_a_profile_is_read_or_measured_again(data: st.DataObject) -> None:
    """Users may edit profiles: a part that cannot be read counts as not measured."""
    observed = prepared(served)
    ((name, profile),) = observed.profiles.items()
    file = data.draw(st.sampled_from([*profile["data"], "failures.json", "more.json"]))
    stored = json.loads(profile["data"].get(file, '{"key": {"attempt": {"reason": "", "message": "", "job": ""}}}'))
    words = data.draw(WORDS | damaged(stored))
    edited = {**profile, "data": {**profile["data"], file: words}}
    plan = decide(replace(observed, profiles={name: edited}), SETTINGS)
    assert_sound(plan, observed)
    assert SpeculativeServiceStatus.model_validate(plan.status.wire()) == plan.status


@given(words=WORDS, key=st.sampled_from(["config.json", "pod-template.json"]))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_stands_in_a_revision_the_pods_stay(words: str, key: str) -> None:
    """Its ConfigMap is immutable, but may be deleted and created again by hand: no pod is created from its contents."""
    observed = prepared(served)
    where = next(k for k, d in observed.children.items() if "pod-template.json" in d.get("data", {}))
    document = observed.children[where]
    edited = {**document, "data": {**document["data"], key: words}}
    plan = decide(replace(observed, children={**observed.children, where: edited}), SETTINGS)
    assert_sound(plan, observed, forged=where[1])
    live = observed.children[DEPLOYMENT, "chat"]["spec"]["template"]
    assert all(deployment["spec"]["template"] == live for deployment in find(plan, DEPLOYMENT))


def test_a_timestamp_of_300_characters_is_no_measurement() -> None:
    """It is longer than the status may hold: the service is scaled and reported all the same."""
    world = started()
    (job,) = world.jobs()
    world.measure(job)
    ended = world.job_pods[job]["status"]["containerStatuses"][0]["state"]["terminated"]
    ended["message"] = ended["message"].replace(rfc3339(world.now), "9" * 300)
    world.change(replicas=2)
    assert world.deployment()["spec"]["replicas"] == 2
    assert world.reason(C.PROFILES_READY) == "False/Failed"


SPECS = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(0, 3),
        "paused": st.booleans(),
        "draftPool": st.sampled_from([[], [PLD], [EAGLE], [PLD, EAGLE], [EAGLE, PLD]]),
        "speculation": st.fixed_dictionaries({"maxDraftTokens": st.integers(1, 6)}),
        "engine": st.sampled_from([{}, {"maxModelLen": 64}, {"maxModelLen": 128}]),
        "profiling": st.sampled_from([{}, {"mode": "Required"}, {"mode": "Skip"}]),
        "rollout": st.sampled_from([{}, {"maxUnavailable": 1}]),
    },
)
HAPPENINGS = st.lists(
    st.one_of(
        SPECS,
        st.sampled_from(["roll out", "measure", "fail", "report", "lose a child", "lose the status", "restart"]),
        st.sampled_from(["ServiceAccount", "ConfigMap", "Deployment", "Service", JOB]).map(
            lambda kind: f"refuse {kind}"
        ),
        st.just("accept"),
    ),
    max_size=10,
)


def happen(world: World, what: Any) -> None:
    """One thing that a user or the cluster does."""
    if isinstance(what, dict):
        world.patch(**what)
    elif what == "roll out" and (DEPLOYMENT, "chat") in world.objects:
        world.roll_out()
    elif what in ("measure", "fail") and world.jobs():
        job = world.jobs()[0]
        world.measure(job) if what == "measure" else world.finish_job(job, "boom", exit_code=1)
    elif what == "report" and ("ConfigMap", "chat-hot") in world.objects:
        world.report_states()
    elif what == "lose a child" and world.objects:
        del world.objects[sorted(world.objects)[len(world.objects) // 2]]
    elif what == "lose the status":
        world.services["chat"].pop("status", None)
    elif what == "restart":  # what memory held
        world.states.clear()
        world.refusals = ()
    elif what == "accept":
        world.accept()
    elif what.startswith("refuse "):
        world.refuse(lambda document: document["kind"] == what.removeprefix("refuse "), "no")


@given(happenings=HAPPENINGS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.slow
def test_whatever_happens_it_ends_in_the_same_place(happenings: list[Any]) -> None:
    """Level-based: after any history the world comes to rest, and the pods run what a fresh service of that spec
    would (a revision built for more draft tokens serves as well)."""
    world = World(manifest())
    for what in happenings:
        happen(world, what)
        observed = world.observed()
        assert_sound(world.reconcile(), observed)
    world.accept()
    world.patch(profiling={}, paused=False)
    for _ in range(4):
        world.settle()
        world.roll_out()
        for job in world.jobs():
            world.measure(job)
    world.settle()
    world.replica_sets = {f"chat-{world.revision()}": world.replica_sets[f"chat-{world.revision()}"]}
    world.report()
    assert world.reason(C.UPDATED) == "True/UpToDate" or world.observed().service["spec"].get("replicas") == 0
    assert world.jobs() == []
    maps = [name for kind, name in world.objects if kind == "ConfigMap" and not name.startswith("outrider-profile")]
    assert sorted(maps) == sorted(["chat-hot", f"chat-{world.revision()}"])
    fresh = World(manifest(**world.services["chat"]["spec"])).settled()
    mine, theirs = (w.deployment()["spec"]["template"]["spec"]["containers"] for w in (world, fresh))
    assert mine == theirs
