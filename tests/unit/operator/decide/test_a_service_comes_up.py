"""A new service until it is measured and answers: children, Job, profile, conditions."""

from __future__ import annotations

import json

from outrider_crds.conditions import ConditionType as C
from outrider_operator import cluster_model

from tests.unit.operator.decide.world import EAGLE, PLD, World, find, gpu_node, manifest


def test_first_look_makes_all_children_and_sets_all_conditions() -> None:
    """Each condition is set at first sight, and the children of a service are made."""
    world = World(manifest())
    plan = world.reconcile()
    assert [c.type for c in plan.status.conditions] == list(C)
    assert all(c.observed_generation == 1 for c in plan.status.conditions)
    world.settle()
    revision = world.revision()
    assert sorted(world.objects) == sorted(
        [
            (cluster_model.CONFIG_MAP, f"chat-{revision}"),
            (cluster_model.CONFIG_MAP, "chat-hot"),
            (cluster_model.DEPLOYMENT, "chat"),
            (cluster_model.DISRUPTION_BUDGET, "chat"),
            (cluster_model.KUBERNETES_SERVICE, "chat"),
            (cluster_model.SERVICE_ACCOUNT, "chat"),
        ]
    )


def test_the_accelerator_stands_in_the_status_as_people_write_it() -> None:
    """A printer column of a list would show its JSON."""
    world = World(manifest())
    assert world.reconcile().status.accelerator == "cpu"
    world.patch(accelerator={"products": ["NVIDIA-L4", "NVIDIA-H200"]})
    assert world.reconcile().status.accelerator == "NVIDIA-L4,NVIDIA-H200"


def test_a_service_is_measured_rolled_out_and_updated() -> None:
    """The happy path: the Job starts once the pods have nodes, its result is stored, then it goes."""
    world = World(manifest()).settled()
    assert world.jobs() == [], "serving pods are placed before a Job may take their room"
    world.replace_pods()
    assert len(world.jobs()) == 1
    assert world.reason(C.PROFILES_READY) == "False/Profiling"
    world.measure(world.jobs()[0])
    plan = world.reconcile()
    assert len(world.jobs()) == 1, "the Job stays until its result is seen to be stored"
    assert plan.requeue_after_s is not None, "the operator's own write of the result wakes nobody"
    world.settle()
    assert world.jobs() == []
    assert world.reason(C.UPDATED) == "False/ConfigPending"
    assert "no answer on its state endpoint" in world.condition(C.UPDATED).message
    world.report_states()
    plan = world.settle()
    assert plan.is_idle
    assert {kind: world.reason(kind) for kind in list(C)[:6]} == {
        C.SPEC_VALID: "True/Accepted",
        C.PROFILES_READY: "True/Profiled",
        C.AVAILABLE: "True/EnoughReadyPods",
        C.UPDATED: "True/UpToDate",
        C.PROGRESSING: "False/Complete",
        C.READY: "True/EndpointReady",
    }
    assert plan.status.profiles[0].error_percent == "4"
    assert plan.status.profiles[0].config_map.startswith("outrider-profile-")
    assert plan.status.drafts[0].profiled


def test_the_stored_profile_is_what_the_runtime_mounts() -> None:
    """target.json and <drafter key>.json under the target key that the boot config names."""
    world = World(manifest()).served()
    boot = json.loads(world.objects[cluster_model.CONFIG_MAP, f"chat-{world.revision()}"]["data"]["config.json"])
    keys = boot["profileKeys"][0]
    stored = world.objects[cluster_model.CONFIG_MAP, f"outrider-profile-{keys['target']}"]["data"]
    assert json.loads(stored["target.json"])["key"] == keys["target"]
    assert json.loads(stored[f"{keys['drafters']['pld']}.json"])["name"] == "pld"


def test_a_draft_that_is_patched_in_is_measured_alone() -> None:
    """A Job measures only what is missing."""
    world = World(manifest()).served()
    world.change(draftPool=[PLD, EAGLE])
    world.replace_pods()
    request = world.created_jobs[-1]
    assert (request.target, request.drafters) == (False, ("eagle",))
    world.profile(world.jobs()[0])
    assert world.reason(C.PROFILES_READY) == "True/Profiled"


def test_three_products_get_three_jobs_and_annotated_pods() -> None:
    """Several products: a Job each, all profiles mounted, the pod annotated once it has a node."""
    products = ["NVIDIA-H200", "NVIDIA-A100", "NVIDIA-L4"]
    world = World(
        manifest(accelerator={"products": products}, replicas=2),
        nodes=tuple(gpu_node(f"node-{p}", p) for p in products),
    ).settled()
    pod = world.deployment()["spec"]["template"]["spec"]
    mounts = {m["mountPath"]: m for m in pod["containers"][0]["volumeMounts"]}
    assert all(f"/etc/outrider/profiles/{p}" in mounts for p in products)
    assert not any("subPath" in mount for mount in mounts.values()), "a subPath mount would never be updated"
    world.replace_pods()
    assert sorted(request.keys.product for request in world.created_jobs) == sorted(products)
    assert all(p["metadata"]["annotations"]["outrider.dev/product"] == "NVIDIA-H200" for p in world.pods.values())


def test_a_job_runs_on_its_product_under_the_limits_of_the_spec() -> None:
    """backoffLimit 0, disruptions ignored, timeout on the pod, GPUs of the engine, no token."""
    world = World(
        manifest(
            accelerator={"products": ["NVIDIA-H200"], "count": 2},
            engine={"tensorParallelSize": 2},
            profiling={"timeout": "10m", "timeBudget": "2m"},
        ),
        nodes=(gpu_node("a", "NVIDIA-H200"),),
    ).settled()
    world.roll_out()
    plan = world.reconcile()
    job = find(plan, cluster_model.JOB)[0]
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    assert pod["activeDeadlineSeconds"] == 600
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert pod["automountServiceAccountToken"] is False
    assert "--time-budget" in pod["containers"][0]["args"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"][-1]["values"] == ["NVIDIA-H200"]


def test_an_idle_service_is_not_written() -> None:
    """50 idle services stay under one API write a minute: nothing to do means nothing done, and no new status."""
    world = World(manifest()).served()
    for _ in range(5):
        world.now += 60
        before = world.services["chat"]["status"]
        plan = world.reconcile()
        assert plan.is_idle
        assert plan.status.wire() == before
        assert plan.events == ()


def test_new_service_gets_no_event_for_its_initial_conditions() -> None:
    """Eight Events for each of 300 new services were half of all writes; one that is wrong from birth gets its own."""
    assert World(manifest()).reconcile().events == ()
    wrong = World(manifest(target={"name": "m", "source": {"hostPath": {"path": "/somewhere"}}})).reconcile()
    assert [event.reason for event in wrong.events if event.warning] == ["SpecValidHostPathForbidden"]


def test_a_rollout_that_is_complete_is_one_event() -> None:
    """Three hundred new services: each event is a write of its own."""
    world = World(manifest(replicas=0)).settled()
    world.roll_out()
    assert [event.reason for event in world.reconcile().events] == ["UpdatedUpToDate"]
