"""What only the cluster can hold against a spec is a condition; children and Ready stay as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_operator.cluster_model import TOO_LARGE
from outrider_operator.decide.desired.revisions import CONTENTS_ANNOTATION, _fingerprint

from tests.unit.operator.decide.world import EAGLE, PLD, World, manifest, settings_with

HOST = {"hostPath": {"path": "/models/x"}}
UPWARDS = {"hostPath": {"path": "/models/a/../../etc"}}
WRITABLE = {"volumes": [{"name": "v", **HOST}], "volumeMounts": [{"name": "v", "mountPath": "/x"}]}
"""The CRD refuses it, and lets a service be that was there before it did."""


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"target": {"name": "m", "source": HOST}}, "HostPathForbidden", "PersistentVolumeClaim"),
        ({"podTemplate": {"volumes": [{"name": "v", **HOST}]}}, "HostPathForbidden", "PersistentVolumeClaim"),
        ({"metrics": {"source": "Prometheus"}}, "PrometheusNotConfigured", "metrics.source: Pods"),
        ({"engine": {"backend": "TensorRT"}}, "InvalidSpec", "spec.engine.backend"),
        ({"podTemplate": WRITABLE}, "InvalidSpec", "spec.podTemplate"),
        ({"target": {"name": "m", "source": UPWARDS}}, "InvalidSpec", "must not contain '..'"),
        ({"podTemplate": {"volumes": [{"name": "v", **UPWARDS}]}}, "InvalidSpec", "must not contain '..'"),
    ],
    ids=["target", "volume", "prometheus", "schema", "writable", "target upwards", "volume upwards"],
)
def test_spec_that_cannot_be_applied_changes_nothing(change: dict[str, Any], reason: str, remedy: str) -> None:
    """SpecValid=False never touches Ready; Updated tells CI why it waits in vain; no retry loop."""
    world = World(manifest()).served()
    world.patch(**change)
    plan = world.reconcile()
    assert plan.is_idle
    assert plan.requeue_after_s is None
    assert world.reason(C.SPEC_VALID) == f"False/{reason}"
    assert remedy in world.condition(C.SPEC_VALID).message
    assert world.reason(C.UPDATED) == f"False/{reason}"
    assert world.reason(C.READY) == "True/EndpointReady"
    warned = [event.reason for event in plan.events if event.warning]
    assert warned[:2] == [f"SpecValid{reason}", f"Updated{reason}"]
    assert set(warned[2:]) <= {"ProgressingStalled"}
    assert world.observed().status.observed_generation == 2


def test_host_paths_are_served_where_the_chart_allows_them() -> None:
    """And mounted read-only, as an existing folder."""
    world = World(
        manifest(target={"name": "m", "source": HOST}), settings=settings_with(allowed_host_paths=("/models",))
    ).settled()
    pod = world.deployment()["spec"]["template"]["spec"]
    assert {"name": "outrider-model-target", "hostPath": {"path": "/models/x", "type": "Directory"}} in pod["volumes"]
    mounts = pod["containers"][0]["volumeMounts"]
    assert [mount["readOnly"] for mount in mounts if mount["name"] == "outrider-model-target"] == [True]


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ("/models", True),
        ("/models/", True),
        ("/models//a/./b", True),
        ("/srv/models/a", True),
        ("/srv", False),
        ("/", False),
        ("/models-of-others", False),
    ],
)
@pytest.mark.parametrize("where", ["target", "volume"])
def test_a_host_path_is_allowed_by_whole_names(where: str, path: str, is_allowed: bool) -> None:
    """A prefix of the text is not a folder above; a volume of the pod template gets no further than a model."""
    source = {"hostPath": {"path": path}}
    target = {"target": {"name": "m", "source": source}}
    volume = {"podTemplate": {"volumes": [{"name": "v", **source}]}}
    settings = settings_with(allowed_host_paths=("/models", "/srv/models"))
    world = World(manifest(**(target if where == "target" else volume)), settings=settings)
    world.reconcile()
    assert world.reason(C.SPEC_VALID) == ("True/Accepted" if is_allowed else "False/HostPathForbidden")
    if not is_allowed:
        assert path in world.condition(C.SPEC_VALID).message
        assert "folders other than /models, /srv/models" in world.condition(C.SPEC_VALID).message


@pytest.mark.parametrize("owner", [{"kind": "HelmRelease", "name": "x", "uid": "y", "controller": True}, None])
def test_an_object_of_someone_else_is_not_touched(owner: dict[str, Any] | None) -> None:
    """NameConflict names it and its owner; a hand-made one of that name is left alone, too."""
    world = World(manifest())
    metadata: dict[str, Any] = {"name": "chat", "uid": "1", "resourceVersion": "1"}
    foreign = {"kind": "Service", "metadata": metadata | ({"ownerReferences": [owner]} if owner else {})}
    world.objects["Service", "chat"] = foreign
    plan = world.reconcile()
    assert plan.is_idle
    assert world.reason(C.SPEC_VALID) == "False/NameConflict"
    assert ("HelmRelease x" if owner else "not made by Outrider") in world.condition(C.SPEC_VALID).message
    del world.objects["Service", "chat"]
    world.settle()
    assert world.reason(C.SPEC_VALID) == "True/Accepted"


def test_children_of_a_deleted_namesake_are_waited_for() -> None:
    """Deleted and made again at once: garbage collection has not taken the old children yet."""
    world = World(manifest()).settled()
    world.services["chat"]["metadata"]["uid"] = "another"
    plan = world.reconcile()
    assert not plan.apply
    assert plan.requeue_after_s == pytest.approx(2)
    assert world.reason(C.SPEC_VALID) == "True/Accepted"
    world.objects.clear()
    world.settle()
    assert world.deployment()["metadata"]["ownerReferences"][0]["uid"] == "another"


@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_a_child_that_a_finalizer_holds_is_named(kind: str) -> None:
    """It may stay for ever, so a condition must tell why the service does not come up."""
    world = World(manifest()).served()
    terminating = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["example.com/stuck"]}
    world.objects[kind, "chat"]["metadata"] |= terminating
    world.settle()
    assert world.reason(C.UPDATED) == "False/RollingOut"
    for condition in (C.UPDATED, C.PROGRESSING):
        assert f"{kind} chat is being deleted" in world.condition(condition).message
        assert "example.com/stuck" in world.condition(condition).message
    del world.objects[kind, "chat"]
    world.settle()
    assert (kind, "chat") in world.objects
    assert "example.com/stuck" not in world.condition(C.UPDATED).message


def test_orphaned_children_are_taken_back() -> None:
    """kubectl delete --cascade=orphan, then the manifest again: the pods live through it."""
    world = World(manifest()).settled()
    for document in world.objects.values():
        document["metadata"]["ownerReferences"] = []
    world.services["chat"]["metadata"]["uid"] = "another"
    revision = world.revision()
    world.settle()
    assert world.revision() == revision
    for document in world.objects.values():
        assert document["metadata"]["ownerReferences"][0]["uid"] == "another"


def test_a_service_that_is_being_deleted_gets_no_children() -> None:
    """Or garbage collection would never end."""
    world = World(manifest())
    world.services["chat"]["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    assert world.reconcile().is_idle


def test_a_status_of_another_release_is_replaced() -> None:
    """A status that this release cannot read must not stop the service."""
    world = World(manifest())
    world.services["chat"]["status"] = {"phase": "Running", "conditions": "x"}
    world.settle()
    assert world.reason(C.SPEC_VALID) == "True/Accepted"


def test_a_spec_that_is_too_large_says_so() -> None:
    world = World(manifest()).served()
    template = world.deployment()["spec"]["template"]
    world.services["chat"]["spec"] = {TOO_LARGE: 900_000}
    world.settle()
    assert world.reason(C.SPEC_VALID) == "False/InvalidSpec"
    assert "900000 bytes" in world.condition(C.SPEC_VALID).message
    assert world.deployment()["spec"]["template"] == template


def test_a_spec_that_was_never_readable_is_not_served() -> None:
    """Another release's CRD let it through: nothing is made, and nothing says that it is available."""
    world = World(manifest(engine={"backend": "TensorRT"}))
    plan = world.settle()
    assert not world.objects
    assert world.reason(C.SPEC_VALID) == "False/InvalidSpec"
    assert world.reason(C.AVAILABLE) == "False/TooFewReadyPods"
    assert world.reason(C.READY) == "False/NoReadyEndpoint"
    assert plan.status.ready_replicas == 0


def test_fields_of_a_later_release_are_left_out_of_a_spec() -> None:
    """The API server fills in a later CRD's defaults on every read: each service was InvalidSpec, and stood still."""
    world = World(
        manifest(speculation={"adaptive": "Never"}, draftPool=[{**PLD, "warmup": "Never"}], canary={})
    ).served()
    assert world.reason(C.SPEC_VALID) == "True/Accepted"
    revision = world.revision()
    world.change(replicas=3, speculation={"mode": "Off", "adaptive": "Always"})
    assert world.reason(C.SPEC_VALID) == "True/Accepted"
    assert world.deployment()["spec"]["replicas"] == 3
    assert world.revision() == revision


SMALL_CHANGE: dict[str, Any] = {
    "replicas": 5,
    "speculation": {"mode": "Off"},
    "sloClasses": [{"name": "chat", "tpot": "70ms"}],
}


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({"target": {"name": "m", "source": HOST}}, "HostPathForbidden"),
        ({"metrics": {"source": "Prometheus"}}, "PrometheusNotConfigured"),
        ({"engine": {"backend": "TensorRT"}}, "InvalidSpec"),
        ({"podTemplate": WRITABLE}, "InvalidSpec"),
        ({TOO_LARGE: 900_000}, "InvalidSpec"),
    ],
)
def test_a_refused_spec_holds_its_revision_and_nothing_else(refused: dict[str, Any], reason: str) -> None:
    """An autoscaler's 8 stayed 2, and mode: Off was not delivered, for a field that has nothing to do with them."""
    world = World(manifest()).served()
    template = world.deployment()["spec"]["template"]
    world.change(**refused, **SMALL_CHANGE)
    assert world.reason(C.SPEC_VALID) == f"False/{reason}"
    assert world.deployment()["spec"]["replicas"] == 5
    assert world.deployment()["spec"]["template"] == template
    hot = json.loads(world.objects["ConfigMap", "chat-hot"]["data"]["config.json"])
    assert hot["mode"] == "Off"
    assert hot["sloClasses"][0]["tpot"] == "70ms"
    assert not world.jobs()
    world.report()
    assert world.reason(C.UPDATED) == f"False/{reason}"


def test_a_foreign_account_does_not_stop_the_scale() -> None:
    """NameConflict of one child: the Deployment that runs is scaled, and what is foreign is left alone."""
    world = World(manifest()).served()
    metadata = {"name": "chat", "uid": "1", "resourceVersion": "1", "labels": {}}
    world.objects["ServiceAccount", "chat"] = {"kind": "ServiceAccount", "metadata": metadata}
    world.change(**SMALL_CHANGE)
    assert world.reason(C.SPEC_VALID) == "False/NameConflict"
    assert world.deployment()["spec"]["replicas"] == 5
    assert world.objects["ServiceAccount", "chat"]["metadata"] == metadata


@pytest.mark.parametrize(
    "unreadable", [{"speculation": {"mode": "Clever"}}, {"sloClasses": 3}, {"defaultSLOClass": "none"}]
)
def test_an_unreadable_kill_switch_is_not_replaced_by_a_default(unreadable: dict[str, Any]) -> None:
    """Off, and then a mode that only a later release knows: a default would have switched speculation on."""
    world = World(manifest(speculation={"mode": "Off"})).served()
    hot = world.objects["ConfigMap", "chat-hot"]["data"]
    world.change(replicas=5, **unreadable)
    assert world.reason(C.SPEC_VALID) == "False/InvalidSpec"
    assert world.objects["ConfigMap", "chat-hot"]["data"] == hot
    assert world.deployment()["spec"]["replicas"] == 5


def test_kill_switch_counts_next_to_an_unknown_value() -> None:
    world = World(manifest(speculation={"mode": "ClosedLoop"})).served()
    world.change(replicas=1, speculation={"mode": "Off", "draftPrefill": "OfALaterRelease"})
    assert json.loads(world.objects["ConfigMap", "chat-hot"]["data"]["config.json"])["mode"] == "Off"


@pytest.mark.parametrize("paused", [False, True])
def test_unknown_method_in_the_running_revision_freezes_nothing(paused: bool) -> None:
    """An operator that was rolled back left replicas, mode Off and SLO classes as they were."""
    world = World(manifest(draftPool=[PLD, EAGLE])).served()
    if paused:
        world.change(draftPool=[PLD, {**EAGLE, "paused": True}])
    revision = world.revision()
    let_a_later_release_have_made(world, revision)
    template = world.deployment()["spec"]["template"]
    world.change(draftPool=[PLD, {**EAGLE, "method": "OfALaterRelease", "paused": paused}], **SMALL_CHANGE)
    assert world.reason(C.SPEC_VALID) == "False/InvalidSpec"
    assert world.deployment()["spec"]["replicas"] == 5
    assert world.deployment()["spec"]["template"] == template
    hot = json.loads(world.objects["ConfigMap", "chat-hot"]["data"]["config.json"])
    assert (hot["mode"], hot["sloClasses"][0]["tpot"]) == ("Off", "70ms")
    assert hot.get("pausedDrafters") == (["eagle"] if paused else None)


def let_a_later_release_have_made(world: World, revision: str) -> None:
    """The running revision, with a method of its drafter `eagle` that is not known here."""
    data = world.objects["ConfigMap", f"chat-{revision}"]["data"]
    data["config.json"] = data["config.json"].replace('"Eagle"', '"OfALaterRelease"')
    contents = _fingerprint(data)
    documents = (world.deployment(), *world.replica_sets.values())
    for document in documents:
        document["metadata"]["annotations"][CONTENTS_ANNOTATION] = contents


def _hot_pool(world: World) -> tuple[list[str] | None, list[str] | None]:
    hot = json.loads(world.objects["ConfigMap", "chat-hot"]["data"]["config.json"])
    return hot.get("pausedDrafters"), hot.get("drafterOrder")


UNREADABLE: dict[str, Any] = {"engine": {"backend": "TensorRT"}}
CACHE = {"pvc": {"claimName": "models"}}
PAUSED = {**PLD, "paused": True}
LATER = {"name": "new", "method": "OfALaterRelease"}


@pytest.mark.parametrize(
    ("change", "hot"),
    [
        (UNREADABLE, (["pld"], ["eagle", "pld"])),
        ({"draftPool": [EAGLE, LATER, PAUSED]}, (["pld"], ["eagle", "pld"])),
        ({"draftPool": [LATER]}, (["pld"], ["eagle", "pld"])),
        ({"draftPool": 3}, (["pld"], ["eagle", "pld"])),
        ({"draftPool": [EAGLE, {**PLD, "paused": 3}]}, (["pld"], ["eagle", "pld"])),
        ({"draftPool": [PLD, {**EAGLE, "paused": True}], **UNREADABLE}, (["eagle"], None)),
    ],
    ids=["kept", "a method of a later release", "left out", "no list", "no boolean", "changed"],
)
def test_unreadable_spec_leaves_paused_drafters_paused(
    change: dict[str, Any], hot: tuple[list[str] | None, list[str] | None]
) -> None:
    """The pool was taken from the boot config, which knows neither order nor pause: a drafter that had been paused for
    its faults ran again."""
    world = World(manifest(draftPool=[PLD, EAGLE])).served()
    world.change(draftPool=[EAGLE, PAUSED])
    assert _hot_pool(world) == (["pld"], ["eagle", "pld"])
    world.change(replicas=5, **change)
    assert world.reason(C.SPEC_VALID) == "False/InvalidSpec"
    assert world.deployment()["spec"]["replicas"] == 5
    assert _hot_pool(world) == hot


def test_spec_too_large_leaves_paused_drafters_paused() -> None:
    """The copy that is kept of it has no draftPool."""
    world = World(manifest(draftPool=[PLD, EAGLE])).served()
    world.change(draftPool=[EAGLE, PAUSED])
    world.services["chat"]["spec"] = {TOO_LARGE: 900_000, "replicas": 5}
    world.settle()
    assert world.deployment()["spec"]["replicas"] == 5
    assert _hot_pool(world) == (["pld"], ["eagle", "pld"])


def test_unreadable_spec_keeps_what_is_profiled() -> None:
    """podTemplate is not kept, and profiles go by its resources: ProfilesReady and drafts[].profiled became false."""
    world = World(manifest(podTemplate={"resources": {"limits": {"cpu": "2"}}}, modelCache=CACHE)).served()
    assert world.reason(C.PROFILES_READY) == "True/Profiled"
    revision, profiles = world.revision(), world.observed().status.profiles
    assert profiles
    world.change(replicas=5, **UNREADABLE)
    assert world.reason(C.SPEC_VALID) == "False/InvalidSpec"
    assert world.reason(C.UPDATED) == "False/InvalidSpec"
    assert world.reason(C.PROFILES_READY) == "True/Profiled"
    assert [draft.profiled for draft in world.observed().status.drafts] == [True]
    assert world.observed().status.profiles == profiles
    assert world.revision() == revision
    assert world.deployment()["spec"]["replicas"] == 5


def test_two_different_tokens_are_refused() -> None:
    """The first alone was used: a private draft was a 401, and left out without a word."""

    def of(secret: str, name: str) -> dict[str, Any]:
        return {"name": name, "source": {"hub": {"tokenSecretRef": {"name": secret}}}}

    world = World(manifest(target=of("a", "org/target"))).served()
    for secret, reason in (("b", "False/InvalidSpec"), ("a", "True/Accepted")):
        eagle = {"name": "eagle", "method": "Eagle", "eagle": {"model": of(secret, "org/eagle")}}
        world.patch(draftPool=[PLD, eagle])
        world.reconcile()
        assert world.reason(C.SPEC_VALID) == reason
        if secret == "b":
            assert "a/token, b/token" in world.condition(C.SPEC_VALID).message
