"""Refused writes: dependent objects wait, everything else continues, and a condition reports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_operator.cluster_model import (
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    KUBERNETES_SERVICE,
    SERVICE_ACCOUNT,
    SERVING,
    ApiRefusal,
    Object,
)
from outrider_operator.decide import decide
from outrider_operator.plan import fingerprint

from tests.unit.operator.decide.world import World, find, manifest

CHANGED = {"maxModelLen": 512}


def is_new_revision_map(document: Object) -> bool:
    return document["kind"] == CONFIG_MAP and "pod-template.json" in document["data"]


def of_kind(kind: str) -> Callable[[Object], bool]:
    return lambda document: document["kind"] == kind


def test_a_pod_is_not_made_before_what_it_mounts() -> None:
    """The first look makes the ConfigMaps and the ServiceAccount, the one that sees them the Deployment."""
    world = World(manifest())
    first = world.reconcile()
    assert {d["kind"] for d in first.create} == {"ServiceAccount", "ConfigMap", "Service", "PodDisruptionBudget"}
    assert not find(first, DEPLOYMENT)
    assert find(world.reconcile(), DEPLOYMENT)


def test_a_refused_revision_map_is_not_rolled_out() -> None:
    """A quota on ConfigMaps: the old pods stay, also where the rollout may take one away first."""
    world = World(manifest(rollout={"maxSurge": 0, "maxUnavailable": 1})).served()
    revision = world.revision()
    world.refuse(is_new_revision_map, "exceeded quota: count/configmaps")
    world.change(engine=CHANGED, replicas=2)
    assert world.revision() == revision
    assert world.deployment()["spec"]["replicas"] == 2, "what is not refused is applied"
    for kind, status in ((C.SPEC_VALID, "False/ChildRejected"), (C.UPDATED, "False/ChildRejected")):
        assert world.reason(kind) == status
        assert "exceeded quota: count/configmaps" in world.condition(kind).message
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    assert world.reason(C.READY) == "True/EndpointReady"
    world.accept()
    world.settle()
    assert world.revision() != revision
    assert world.reason(C.SPEC_VALID) == "True/Accepted"


def test_a_refused_template_does_not_keep_a_change_of_scale_away() -> None:
    """HTTP 500 or 422 for the Deployment with the new pods: the running revision is scaled meanwhile."""
    world = World(manifest()).served()
    revision = world.revision()
    world.refuse(is_new_deployment_of(world), "quantities must match the regular expression")
    world.change(engine=CHANGED, replicas=3)
    assert (world.revision(), world.deployment()["spec"]["replicas"]) == (revision, 3)
    assert world.reason(C.SPEC_VALID) == "False/ChildRejected"
    assert world.reason(C.UPDATED) == "False/ChildRejected"
    world.accept()
    world.settle()
    assert world.revision() != revision


def is_new_deployment_of(world: World) -> Callable[[Object], bool]:
    before = world.revision()
    return lambda d: d["kind"] == DEPLOYMENT and d["spec"]["template"]["metadata"]["labels"][REVISION] != before


REVISION = "outrider.dev/revision"


@pytest.mark.parametrize("kind", ["ServiceAccount", "ConfigMap", "Deployment", "Service", "PodDisruptionBudget"])
def test_whatever_is_refused_of_a_new_service_is_named(kind: str) -> None:
    """And nothing is sent again before it is due."""
    world = World(manifest())
    world.refuse(of_kind(kind), "no, and here is why")
    plan = world.settle()
    assert plan.is_idle
    assert world.reason(C.SPEC_VALID) == "False/ChildRejected"
    assert world.reason(C.UPDATED) == "False/ChildRejected"
    assert world.reason(C.READY) == "False/NoReadyEndpoint"
    assert "no, and here is why" in world.condition(C.SPEC_VALID).message
    assert ((DEPLOYMENT, "chat") in world.objects) == (kind in ("Service", "PodDisruptionBudget"))
    world.accept()
    world.settle()
    assert world.reason(C.SPEC_VALID) == "True/Accepted"
    assert (DEPLOYMENT, "chat") in world.objects


def test_a_service_may_be_called_like_a_profile() -> None:
    """The component of a refusal was guessed by the name: a refused Deployment belonged to none."""
    name = "outrider-profile-a"
    world = World(manifest(name))
    world.refuse(of_kind(DEPLOYMENT), "no, and here is why")
    world.settle(name)
    assert world.reason(C.SPEC_VALID, name) == "False/ChildRejected"
    assert world.reason(C.UPDATED, name) == "False/ChildRejected"
    assert "no, and here is why" in world.condition(C.SPEC_VALID, name).message


@pytest.mark.parametrize(
    ("service", "reason"), [({}, "False/ChildRejected"), ({"paused": True}, "False/Learning")], ids=["asked", "paused"]
)
def test_a_refused_job_is_reported_with_the_profiles(service: dict[str, Any], reason: str) -> None:
    """It makes no spec invalid: the pods serve, and learn online."""
    world = World(manifest())
    world.refuse(of_kind(JOB), "exceeded quota: count/jobs.batch")
    world.settle()
    world.roll_out()
    world.report()
    world.change(**service)
    assert world.reason(C.PROFILES_READY) == reason
    assert world.reason(C.SPEC_VALID) == "True/Accepted"
    if not service:
        assert "count/jobs.batch" in world.condition(C.PROFILES_READY).message
        assert world.reason(C.UPDATED) == "True/UpToDate"


def test_a_measurement_that_cannot_be_stored_is_no_profile() -> None:
    """A quota, or an object of that name of another owner: pods mount nothing, and the status said Profiled."""
    world = World(manifest()).settled()
    world.roll_out()
    world.report()
    world.refuse(is_profile, 'configmaps "outrider-profile" already exists')
    world.profile(world.jobs()[0])
    assert world.reason(C.PROFILES_READY) == "False/ChildRejected"
    assert "already exists" in world.condition(C.PROFILES_READY).message
    assert world.jobs(), "what it measured would be lost"
    world.accept()
    world.settle()
    assert world.reason(C.PROFILES_READY) == "True/Profiled"
    assert world.jobs() == []


def test_refused_write_leaves_a_foreign_object_alone() -> None:
    """May it be applied, and is it refused: two questions. A Service that another made meanwhile is left alone."""
    world = World(manifest())
    world.refuse(of_kind(KUBERNETES_SERVICE), "exceeded quota: services")
    world.settle()
    foreign = {
        "kind": KUBERNETES_SERVICE,
        "metadata": {"name": "chat", "uid": "theirs", "resourceVersion": "1"},
        "spec": {},
    }
    world.objects[KUBERNETES_SERVICE, "chat"] = foreign
    plan = world.reconcile()
    assert not find(plan, KUBERNETES_SERVICE)
    assert world.reason(C.SPEC_VALID) == "False/NameConflict"
    world.accept()
    assert not find(world.reconcile(), KUBERNETES_SERVICE)
    assert world.objects[KUBERNETES_SERVICE, "chat"] is foreign


def test_a_revision_map_of_someone_else_is_not_mounted() -> None:
    """Its name can be known in advance: what stands there was not made by Outrider."""
    world = World(manifest()).settled()
    (name,) = (n for k, n in world.objects if k == CONFIG_MAP and n != "chat-hot")
    world.objects.clear()
    metadata = {"name": name, "uid": "theirs", "labels": {"outrider.dev/service": "chat"}}
    world.objects[CONFIG_MAP, name] = {"kind": CONFIG_MAP, "metadata": metadata, "data": {}}
    world.settle()
    assert world.reason(C.SPEC_VALID) == "False/NameConflict"
    assert (DEPLOYMENT, "chat") not in world.objects


@pytest.mark.parametrize(("account", "reason"), [("chat", "True/Accepted"), (None, "False/NameConflict")])
def test_named_account_with_the_services_name_is_no_conflict(account: str | None, reason: str) -> None:
    """IRSA: the account `chat` of service `chat` kept it from having a Deployment."""
    world = World(manifest(podTemplate={"serviceAccountName": account} if account else {}))
    metadata = {"name": "chat", "uid": "theirs", "resourceVersion": "1"}
    theirs = world.objects[SERVICE_ACCOUNT, "chat"] = {"kind": SERVICE_ACCOUNT, "metadata": metadata}
    world.settle()
    assert world.reason(C.SPEC_VALID) == reason
    assert ((DEPLOYMENT, "chat") in world.objects) is (account is not None)
    assert world.objects[SERVICE_ACCOUNT, "chat"] is theirs


def is_profile(document: Object) -> bool:
    return str(document["metadata"]["name"]).startswith("outrider-profile") and document["kind"] == CONFIG_MAP


def test_an_apply_names_the_very_object_that_was_seen() -> None:
    """One that takes its name meanwhile is another one's."""
    world = World(manifest()).served()
    world.patch(replicas=2)
    (document,) = find(world.reconcile(), DEPLOYMENT)
    assert document["metadata"]["uid"] == world.deployment()["metadata"]["uid"]


def test_deployment_changed_by_admission_serves_and_is_reported() -> None:
    """A policy of the cluster sets imagePullPolicy: its platform team wants that, and the user is to know."""
    world = World(manifest()).served()
    world.deployment()["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] = "Always"
    (write,) = decide(world.observed(), world.settings).apply
    said = 'spec.template.spec.containers[runtime].imagePullPolicy is "Always", not "IfNotPresent"'
    world.refusals = (ApiRefusal(DEPLOYMENT, "chat", SERVING, said, fingerprint(write), is_stored=True),)
    plan = world.settle()
    assert plan.is_idle
    assert world.reason(C.SPEC_VALID) == "True/Accepted"
    assert said in world.condition(C.SPEC_VALID).message
    assert world.reason(C.UPDATED) == "True/UpToDate"
    assert world.reason(C.PROGRESSING) == "False/Complete"
    world.change(engine=CHANGED)
    assert find(world.settle(), DEPLOYMENT) == []
    assert world.deployment()["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] == "IfNotPresent"
