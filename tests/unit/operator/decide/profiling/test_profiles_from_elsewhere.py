"""Profiles that another namespace, or another image of the same engine, measured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_crds.profile_keys import ProfileKeys
from outrider_operator.cluster_model import CONFIG_MAP, JOB, Object
from outrider_operator.decide.desired.profile_store import Store, read_store
from outrider_operator.decide.profiling.known_profiles import newest
from outrider_operator.decide.profiling.profile_maps import KEPT_S, MOST_SHARED

from tests.unit.operator.decide.world import (
    EAGLE,
    PLD,
    World,
    manifest,
    rfc3339,
    settings_with,
    started,
    target_profile,
)

SHARING = settings_with(namespace="outrider-system", profiling_shared_from=("platform",))
CLAIM: dict[str, Any] = {"pvc": {"claimName": "models", "path": "target"}}


def world_of(namespace: str, shared: dict[str, Object] | None = None, **spec: Any) -> World:
    service = manifest(**spec)
    service["metadata"]["namespace"] = namespace
    world = World(service, settings=SHARING)
    world.shared = shared if shared is not None else {}
    return world


def shared_by_platform(**spec: Any) -> dict[str, Object]:
    world = world_of("platform", **spec)
    world.serve()
    return world.shared


def test_one_measurement_serves_the_cluster() -> None:
    """Forty services in twelve namespaces measured the same model twelve times."""
    shared = shared_by_platform()
    (document,) = shared.values()
    assert document["metadata"]["namespace"] == "outrider-system"
    assert "ownerReferences" not in document["metadata"]
    tenant = world_of("tenant", shared)
    tenant.settle()
    assert tenant.reason(C.PROFILES_READY) == "True/Profiled"
    tenant.replace_pods()
    assert tenant.created_jobs == []


def test_a_required_profile_may_come_from_the_platform() -> None:
    tenant = world_of("tenant", shared_by_platform(), profiling={"mode": "Required"})
    tenant.settle()
    assert tenant.deployment()["metadata"]["namespace"] == "tenant"
    assert tenant.created_jobs == []


def test_a_tenants_measurement_reaches_no_other_namespace() -> None:
    """A user with the right to create pods can make a Job report anything."""
    tenant = world_of("tenant")
    tenant.serve()
    assert tenant.reason(C.PROFILES_READY) == "True/Profiled"
    assert tenant.shared == {}


def test_a_forged_shared_profile_in_a_tenants_namespace_is_none() -> None:
    """The label and the name of a shared profile mean nothing outside the operator's namespace, not even in the
    tenant's own: its Job measures."""
    (document,) = shared_by_platform().values()
    tenant = world_of("tenant")
    forged = copy.deepcopy(document)
    forged["metadata"] |= {"namespace": "tenant", "uid": "forged", "resourceVersion": "1"}
    tenant.objects[CONFIG_MAP, forged["metadata"]["name"]] = forged
    tenant.settle()
    assert tenant.reason(C.PROFILES_READY) == "False/Learning"


@pytest.mark.parametrize(
    "spec",
    [
        {"target": {"name": "org/target", "source": CLAIM}},
        {"podTemplate": {"envFrom": [{"configMapRef": {"name": "tuning"}}]}},
        {"podTemplate": {"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "tuning", "key": "a"}}}]}},
    ],
)
def test_what_a_namespace_alone_has_is_not_shared(spec: dict[str, Any]) -> None:
    """A claim of the same name holds other weights in another namespace."""
    assert shared_by_platform(**spec) == {}


def test_a_draft_of_a_claim_is_measured_in_each_namespace() -> None:
    draft = {"name": "eagle", "method": "Eagle", "eagle": {"model": {"name": "org/eagle", "source": CLAIM}}}
    shared = shared_by_platform(draftPool=[PLD, draft])
    (document,) = shared.values()
    assert len(read_store(document).drafters) == 1
    tenant = world_of("tenant", shared, draftPool=[PLD, draft])
    tenant.settle()
    tenant.replace_pods()
    (measured,) = tenant.created_jobs
    assert (measured.target, measured.drafters) == (False, ("eagle",))


def test_a_further_draft_joins_the_shared_profile() -> None:
    world = world_of("platform")
    world.serve()
    world.patch(draftPool=[PLD, EAGLE])
    world.serve()
    (document,) = world.shared.values()
    assert len(read_store(document).drafters) == 2


def test_a_job_of_the_platform_is_waited_for() -> None:
    """Two namespaces that ask in the same minute make one measurement."""
    world = world_of("platform")
    world.settle()
    world.replace_pods()
    tenant = world_of("tenant")
    tenant.measured_elsewhere = frozenset(world.jobs())
    tenant.settle()
    tenant.roll_out()
    plan = tenant.reconcile()
    assert tenant.jobs() == []
    assert plan.requeue_after_s is not None
    assert "of another namespace" in tenant.condition(C.PROFILES_READY).message


def test_of_two_jobs_that_began_at_once_the_later_goes() -> None:
    """Each of two namespaces saw no Job of the other when it made its own, and both measured."""
    second = world_of("second")
    second.settle()
    second.replace_pods()
    (job,) = second.jobs()
    second.measured_elsewhere = frozenset({job})
    second.settle()
    assert second.jobs() == []
    assert "of another namespace" in second.condition(C.PROFILES_READY).message


def test_a_job_that_runs_measures_to_its_end() -> None:
    """Its accelerator is taken already."""
    second = world_of("second")
    second.settle()
    second.replace_pods()
    (job,) = second.jobs()
    second.job_pods[job] = {
        "metadata": {"name": f"{job}-x", "labels": {"batch.kubernetes.io/job-name": job}},
        "status": {"phase": "Running", "containerStatuses": [{"name": "profiler", "state": {"running": {}}}]},
    }
    second.measured_elsewhere = frozenset({job})
    second.settle()
    assert job in second.jobs()


def test_a_job_that_waits_for_room_goes_once_others_measured() -> None:
    tenant = world_of("tenant")
    tenant.settle()
    tenant.replace_pods()
    assert len(tenant.jobs()) == 1
    tenant.shared = shared_by_platform()
    tenant.settle()
    assert tenant.jobs() == []
    assert tenant.reason(C.PROFILES_READY) == "True/Profiled"


def test_a_stale_profile_gives_way_to_the_shared_one() -> None:
    """`profiling.maxAge` has each namespace measure again: one of them is enough."""
    shared = shared_by_platform()
    tenant = world_of("tenant", shared, profiling={"maxAge": "2h"})
    tenant.settle()
    tenant.now += 3 * 3600
    platform = world_of("platform")
    platform.now = tenant.now
    platform.serve()
    tenant.shared = platform.shared
    tenant.settle()
    assert tenant.reason(C.PROFILES_READY) == "True/Profiled"
    assert tenant.jobs() == []


@pytest.mark.parametrize("age_s", [KEPT_S - 3600, KEPT_S + 3600])
def test_full_store_of_shared_profiles_replaces_only_old_ones(age_s: float) -> None:
    """Each reconcile published one and deleted another, for ever, once 65 were in use."""
    world = world_of("platform")
    old = {"uid": "u", "resourceVersion": "1", "creationTimestamp": rfc3339(world.now - age_s), "namespace": "x"}
    names = [f"outrider-profile-{number:x}" for number in range(MOST_SHARED)]
    for name in names:
        metadata = {**old, "name": name.replace("outrider-", "outrider-shared-", 1)}
        world.shared[name] = {"metadata": metadata, "data": {}}
    world.serve()
    assert len(world.shared) == MOST_SHARED
    assert (list(world.shared) == names) is (age_s < KEPT_S)


@pytest.mark.parametrize("earlier", ["2026-11-21T12:00:00Z", "2026-11-21T13:30:00+02:00"])
def test_newest_measurement_is_found_by_time(earlier: str) -> None:
    """The texts were compared: "12:00:00Z" is above "12:00:00.5Z", and offsets sort anyhow."""
    later = "2026-11-21T12:00:00.5Z"
    keys = ProfileKeys(product="cpu", target="a", drafters={})
    old, new = (Store(target_profile("a", "cpu", at)) for at in (earlier, later))
    assert newest(old, new, keys) == newest(new, old, keys) == new


UPGRADED = settings_with(runtime_image_cpu="outrider/runtime-cpu:2", runtime_engine_version_cpu="0.32.0")


def upgraded(engine_version: str, **fields: Any) -> World:
    """A service that was measured, then moves to the next release's image, whose engine is vLLM 0.32.0."""
    world = started(draftPool=[PLD, EAGLE])
    world.profile(world.jobs()[0], engine_version=engine_version)
    world.report()
    world.created_jobs.clear()
    world.settings = UPGRADED.model_copy(update={"runtime_upgrade_percent": 100, **fields})
    world.settle()
    world.replace_pods()
    return world


def test_a_profile_is_kept_through_images_of_one_engine() -> None:
    """Each release of Outrider measured every model again, on a second full set of GPUs, for the same vLLM."""
    world = upgraded("0.32.0")
    assert world.deployment()["spec"]["template"]["spec"]["containers"][0]["image"] == "outrider/runtime-cpu:2"
    assert world.created_jobs == []
    assert world.reason(C.PROFILES_READY) == "True/Profiled"


@pytest.mark.parametrize(
    ("engine_version", "fields"), [("0.31.0", {}), ("", {}), ("0.32.0", {"runtime_engine_version_cpu": ""})]
)
def test_another_engine_is_measured_again(engine_version: str, fields: dict[str, Any]) -> None:
    assert [job.target for job in upgraded(engine_version, **fields).created_jobs] == [True]


def test_an_image_of_the_users_own_is_measured() -> None:
    """Nothing says which engine is in it."""
    world = upgraded("0.32.0")
    world.change(podTemplate={"image": "mine:1"})
    world.replace_pods()
    assert [name for kind, name in world.objects if kind == JOB]


def test_contents_are_read_before_they_are_decided_on() -> None:
    """The watch brings the metadata of ConfigMaps alone: what was not read counted as not measured."""
    tenant = world_of("tenant", copy.deepcopy(shared_by_platform()))
    (document,) = tenant.shared.values()
    del document["data"]
    plan = tenant.reconcile()
    assert plan.read_shared == (document["metadata"]["name"],)
    assert plan.reads
    assert not plan.create
