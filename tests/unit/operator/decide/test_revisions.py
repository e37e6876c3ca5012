"""What is hot, what has no effect on pods, what makes a revision."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_crds.runtime_config import HotConfig
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_operator.cluster_model import CONFIG_MAP, DEPLOYMENT, REVISION_LABEL
from outrider_operator.decide.desired import wanted_revision
from outrider_operator.decide.desired.revisions import BOOT_TOKENS_ANNOTATION
from outrider_operator.decide.desired.wanted_revision import inputs_hash

from tests.unit.operator.decide.world import (
    EAGLE,
    PLD,
    SETTINGS,
    World,
    boot_configs_read,
    boot_of,
    find,
    manifest,
    settings_with,
)

HOT: list[dict[str, Any]] = [
    {"speculation": {"mode": "Off"}},
    {"speculation": {"draftPrefill": "Never"}},
    {"speculation": {"maxDraftTokens": 3}},
    {"sloClasses": [{"name": "chat", "tpot": "20ms"}, {"name": "batch", "tpot": "1s"}]},
    {"draftPool": [PLD | {"paused": True}]},
    {"sloClasses": [{"name": "chat", "tpot": "50ms"}, {"name": "b", "tpot": "1s"}], "defaultSLOClass": "b"},
]
NO_EFFECT: list[dict[str, Any]] = [
    {"replicas": 3},
    {"rollout": {"maxSurge": 2, "progressDeadline": "1h", "drainTimeout": "9m"}},
    {"profiling": {"timeout": "1h", "timeBudget": "9m", "maxAge": "100h"}},
    {"metrics": {"source": "Pods"}},
    {"paused": True},
]
REVISION: list[dict[str, Any]] = [
    {"target": {"name": "org/other"}},
    {"target": {"name": "org/target", "revision": "abc"}},
    {"draftPool": [PLD, EAGLE]},
    {"draftPool": []},
    {"accelerator": {"products": ["NVIDIA-L4"]}},
    {"accelerator": {"products": ["cpu"], "nodeSelector": {"zone": "a"}}},
    {"accelerator": {"products": ["cpu"], "tolerations": [{"operator": "Exists"}]}},
    {"engine": {"maxModelLen": 1024}},
    {"engine": {"env": [{"name": "OMP_NUM_THREADS", "value": "2"}]}},
    {"modelCache": {"pvc": {"claimName": "models"}}},
    {"podTemplate": {"image": "mine:1"}},
    {"podTemplate": {"labels": {"team": "a"}}},
    {"podTemplate": {"resources": {"limits": {"cpu": "2"}}}},
    {"speculation": {"maxDraftTokens": 6}},
]


@pytest.mark.parametrize("change", HOT, ids=str)
def test_a_hot_change_reaches_pods_without_a_restart(change: dict[str, Any]) -> None:
    """Only the hot ConfigMap changes; Updated waits until the pods report its hash."""
    world = World(manifest()).served()
    world.patch(**change)
    plan = world.reconcile()
    assert [(d["kind"], d["metadata"]["name"]) for d in (*plan.create, *plan.apply)] == [(CONFIG_MAP, "chat-hot")]
    assert world.reason(C.UPDATED) == "False/ConfigPending"
    world.report()
    assert world.reason(C.UPDATED) == "True/UpToDate"


def test_paused_drafter_stays_in_boot_config_with_its_profile() -> None:
    """A paused head is not loaded again, and pods of a revision do not differ by what is hot."""
    pools = [PLD, EAGLE], [PLD, EAGLE | {"paused": True}]
    worlds = [World(manifest(draftPool=pool)) for pool in pools]
    for world in worlds:
        world.serve()
    assert worlds[0].revision() == worlds[1].revision()
    hot = HotConfig.model_validate_json(worlds[1].objects[CONFIG_MAP, "chat-hot"]["data"]["config.json"])
    assert hot.paused_drafters == ["eagle"]


def test_the_order_of_the_pool_is_hot() -> None:
    """F14: a sorted YAML, or two field managers, reloaded the target on all pods."""
    world = World(manifest(draftPool=[PLD, EAGLE])).served()
    world.patch(draftPool=[EAGLE, PLD])
    plan = world.reconcile()
    assert [(d["kind"], d["metadata"]["name"]) for d in (*plan.create, *plan.apply)] == [(CONFIG_MAP, "chat-hot")]
    assert _hot_order(world) == ["eagle", "pld"]


def test_hot_order_is_kept_while_pods_of_another_order_serve() -> None:
    """A third draft, added after a change of order: the new pods boot with that order, and the old ones lost it."""
    world = World(manifest(draftPool=[PLD, EAGLE], profiling={"mode": "Skip"})).served()
    world.change(draftPool=[EAGLE, PLD])
    world.change(draftPool=[EAGLE, PLD, EAGLE | {"name": "third"}])
    world.settle()
    assert _hot_order(world) == ["eagle", "pld", "third"]
    world.replace_pods()
    assert _hot_order(world) is None


def _hot_order(world: World) -> list[str] | None:
    data = world.objects[CONFIG_MAP, "chat-hot"]["data"]
    return HotConfig.model_validate_json(data["config.json"]).drafter_order


def test_revision_hashed_with_its_pools_order_is_recognised() -> None:
    """The order was part of the hash before it was hot: a new operator restarts none of those services, in whichever
    order their pools stand by now."""
    spec = SpeculativeServiceSpec.model_validate(manifest(draftPool=[PLD, EAGLE])["spec"])
    written = inputs_hash(spec, SETTINGS.runtime_image_cpu, ["pld", "eagle"])
    assert written == "d8c441eae7"
    assert written != inputs_hash(spec, SETTINGS.runtime_image_cpu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wanted_revision, "inputs_hash", partial(_as_written, ["pld", "eagle"]))
        world = World(manifest(draftPool=[PLD, EAGLE])).served()
    before = world.revision()
    assert world.settle().is_idle
    assert world.revision() == before
    world.change(draftPool=[EAGLE, PLD])
    assert world.revision() == before


NO_NODES: dict[str, Any] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
TERM = {"topologyKey": "z", "labelSelector": {"matchLabels": {"app": ""}}, "namespaces": []}
NEAR = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}}


@pytest.mark.parametrize(
    ("template", "inputs"),
    [
        ({}, "1e93b8c04d"),
        ({"env": [{"name": "E", "value": ""}]}, "11469c0dba"),
        ({"env": [{"name": "E"}]}, "11469c0dba"),
        ({"imagePullSecrets": []}, "1e93b8c04d"),
        ({"affinity": NO_NODES}, "3776fcb584"),
        ({"affinity": NEAR}, "17f43b91cc"),
        ({"volumes": [{"name": "v", "configMap": {"name": "c", "items": []}}]}, "423749e2ae"),
        ({"labels": {"team": ""}}, "20595a7637"),
    ],
    ids=str,
)
def test_empty_value_is_hashed_as_in_the_typed_template(template: dict[str, Any], inputs: str) -> None:
    """podTemplate was typed, and its defaults were left out of the hash: an upgrade restarted pods with `value: ""`."""
    spec = SpeculativeServiceSpec.model_validate(manifest(podTemplate=template)["spec"])
    assert inputs_hash(spec, SETTINGS.runtime_image_cpu) == inputs


def test_empty_text_outside_env_makes_a_revision() -> None:
    """Nodes have labels without a value, and an empty storageClassName is another than the default."""
    hashes = {
        inputs_hash(SpeculativeServiceSpec.model_validate(manifest(podTemplate=template)["spec"]), "i")
        for template in ({}, {"nodeSelector": {"gpu": ""}}, {"nodeSelector": {"gpu": "", "a": ""}})
    }
    assert len(hashes) == 3


def _as_written(written: list[str], spec: SpeculativeServiceSpec, image: str, _order: object = ()) -> str:
    return inputs_hash(spec, image, written)


@pytest.mark.parametrize("change", NO_EFFECT, ids=str)
def test_a_change_without_effect_on_pods_leaves_their_template(change: dict[str, Any]) -> None:
    """replicas, rollout, profiling, metrics and paused restart nothing, and make no revision."""
    world = World(manifest()).served()
    template = copy.deepcopy(world.deployment()["spec"]["template"])
    world.patch(**change)
    plan = world.reconcile()
    assert world.deployment()["spec"]["template"] == template
    assert not find(plan, CONFIG_MAP)


@pytest.mark.parametrize("change", REVISION, ids=str)
def test_other_changes_make_a_revision_and_keep_the_old_one(change: dict[str, Any]) -> None:
    """A new immutable ConfigMap; the old one stays while a ReplicaSet needs it."""
    world = World(manifest()).served()
    old = world.revision()
    world.change(**change)
    world.download()
    assert world.revision() != old
    assert world.objects[CONFIG_MAP, f"chat-{world.revision()}"]["immutable"] is True
    assert (CONFIG_MAP, f"chat-{old}") in world.objects
    del world.replica_sets[f"chat-{old}"]
    world.pods.clear()
    world.reconcile()
    assert (CONFIG_MAP, f"chat-{old}") not in world.objects


def test_draft_tokens_are_hot_up_to_the_value_at_boot_only() -> None:
    """5 -> 3 -> 5 is hot; 6 makes a revision built for 6; from there 4 is hot again."""
    world = World(manifest()).served()
    first = world.revision()
    for tokens in (3, 5):
        world.change(speculation={"maxDraftTokens": tokens})
        assert world.revision() == first
    world.change(speculation={"maxDraftTokens": 6})
    second = world.revision()
    assert second != first
    assert boot_of(world.objects[CONFIG_MAP, f"chat-{second}"])["maxDraftTokens"] == 6
    world.change(speculation={"maxDraftTokens": 4})
    assert world.revision() == second


def test_revert_during_a_rollout_returns_to_the_old_revision() -> None:
    """The old ReplicaSet is taken up again: same name, same template, same ConfigMap."""
    world = World(manifest()).served()
    before = copy.deepcopy(world.deployment()["spec"]["template"])
    world.change(engine={"maxModelLen": 512})
    assert world.revision() != before["metadata"]["labels"][REVISION_LABEL]
    world.change(engine={})
    assert world.deployment()["spec"]["template"] == before


def test_five_patches_end_at_the_last() -> None:
    """Level-based: what came between leaves no trace."""
    world = World(manifest()).served()
    for length in (100, 200, 300, 400):
        world.patch(engine={"maxModelLen": length})
    world.change(engine={"maxModelLen": 500})
    assert boot_of(world.objects[CONFIG_MAP, f"chat-{world.revision()}"])["engine"]["maxModelLen"] == 500


def test_an_upgrade_of_the_operator_restarts_no_serving_pod() -> None:
    """The image was resolved once; the template of a revision is kept, whatever a newer release would render."""
    world = World(manifest()).served()
    template = copy.deepcopy(world.deployment()["spec"]["template"])
    world.settings = settings_with(
        runtime_image_gpu="outrider/runtime:2",
        runtime_image_cpu="outrider/runtime-cpu:2",
        runtime_image_pull_policy="Always",
    )
    assert world.reconcile().is_idle
    world.change(replicas=2)
    assert world.deployment()["spec"]["template"] == template
    assert world.observed().status.runtime_image == "outrider/runtime-cpu:1"


def test_move_between_cpu_and_gpu_takes_the_other_image() -> None:
    """The default image is resolved per kind of hardware, also if the status was lost in between."""
    world = World(manifest()).served()
    world.change(accelerator={"products": ["NVIDIA-L4"]})
    world.services["chat"].pop("status")
    world.settings = settings_with(runtime_image_gpu="outrider/runtime:2")
    world.settle()
    container = world.deployment()["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "outrider/runtime:1"


def test_deleted_revision_map_is_restored_without_a_restart() -> None:
    """Even where maxDraftTokens is below its value at boot by now."""
    world = World(manifest()).served()
    world.change(speculation={"maxDraftTokens": 2})
    revision, template = world.revision(), copy.deepcopy(world.deployment()["spec"]["template"])
    lost = world.objects.pop((CONFIG_MAP, f"chat-{revision}"))
    world.deployment()["spec"]["template"]["spec"]["dnsPolicy"] = "ClusterFirst"  # as the API server defaults it
    world.settle()
    assert world.objects[CONFIG_MAP, f"chat-{revision}"]["data"] == lost["data"]
    assert world.deployment()["spec"]["template"]["spec"]["dnsPolicy"] == "ClusterFirst"
    del world.deployment()["spec"]["template"]["spec"]["dnsPolicy"]
    assert world.deployment()["spec"]["template"] == template


def test_an_annotation_that_is_no_number_of_tokens_is_taken_back() -> None:
    """Python refuses to read a number of 5,000 digits: no decision about the service could be made."""
    world = World(manifest()).served()
    name, annotations = f"chat-{world.revision()}", world.deployment()["metadata"]["annotations"]
    before = annotations[BOOT_TOKENS_ANNOTATION]
    annotations[BOOT_TOKENS_ANNOTATION] = "9" * 5000
    del world.objects[CONFIG_MAP, name]
    world.settle()
    assert world.deployment()["metadata"]["annotations"][BOOT_TOKENS_ANNOTATION] == before
    assert (CONFIG_MAP, name) in world.objects


def test_lost_map_of_another_release_is_made_from_running_pods() -> None:
    """Its template is not what this release would render; nothing restarts all the same."""
    world = World(manifest()).served()
    revision, template = world.revision(), copy.deepcopy(world.deployment()["spec"]["template"])
    world.settings = settings_with(runtime_image_pull_policy="Always")
    del world.objects[CONFIG_MAP, f"chat-{revision}"]
    world.settle()
    assert (CONFIG_MAP, f"chat-{revision}") in world.objects
    assert world.deployment()["spec"]["template"] == template


def test_a_required_profile_holds_the_new_revision_back() -> None:
    """profiling.mode Required: the old pods serve, scale with spec.replicas, until the profile is there."""
    world = World(manifest(profiling={"mode": "Required"})).settled()
    assert (DEPLOYMENT, "chat") not in world.objects
    assert world.reason(C.PROGRESSING) == "False/WaitingForProfile"
    world.profile(world.jobs()[0])
    world.roll_out()
    first = world.revision()
    world.change(engine={"maxModelLen": 512}, replicas=3)
    assert world.revision() == first
    assert world.deployment()["spec"]["replicas"] == 3
    assert world.reason(C.PROGRESSING) == "False/WaitingForProfile"
    assert world.reason(C.UPDATED) == "False/WaitingForProfile"
    world.replace_pods()
    world.profile(world.jobs()[0])
    assert world.revision() != first


def test_new_field_at_its_default_makes_no_revision() -> None:
    """Defaults are left out of the hash: spelled out or not, they are the same revision."""
    world = World(manifest()).served()
    first = world.revision()
    world.change(target={"name": "org/target", "source": {"hub": {}}}, engine={"dtype": "auto", "extraArgs": []})
    assert world.revision() == first


def test_copies_of_a_revision_map_do_not_slow_decisions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenant makes sixty copies of the current revision's map, labels and owner and all: only the map that pods
    mount is read, once in a decision, and the copies go."""
    world = World(manifest()).served()
    name = f"chat-{world.revision()}"
    for number in range(60):
        forged = copy.deepcopy(world.objects[CONFIG_MAP, name])
        forged["metadata"] |= {"name": f"a{number}-{world.revision()}", "uid": f"forged-{number}"}
        world.objects[CONFIG_MAP, forged["metadata"]["name"]] = forged
    reads = boot_configs_read(monkeypatch)
    world.reconcile()
    assert len(reads) == 1
    assert {key[1] for key in world.objects if key[0] == CONFIG_MAP and key[1].startswith("a")} == set()
    assert (CONFIG_MAP, name) in world.objects


def test_foreign_map_with_a_revisions_label_is_left_alone() -> None:
    """Neither read nor deleted."""
    world = World(manifest()).served()
    theirs = copy.deepcopy(world.objects[CONFIG_MAP, f"chat-{world.revision()}"])
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "web", "controller": True}
    theirs["metadata"] |= {"name": f"web-{world.revision()}", "uid": "theirs", "ownerReferences": [owner]}
    world.objects[CONFIG_MAP, theirs["metadata"]["name"]] = theirs
    assert world.settle().is_idle
    assert world.objects[CONFIG_MAP, theirs["metadata"]["name"]] is theirs


def _probes(world: World) -> int:
    (runtime,) = world.deployment()["spec"]["template"]["spec"]["containers"]
    return int(runtime["startupProbe"]["failureThreshold"])


def test_a_raised_deadline_reaches_pods_that_were_never_ready() -> None:
    """A 405B loads for 25 minutes and was killed after 20 for ever, whatever progressDeadline became."""
    world = World(manifest()).settled()
    world.roll_out(ready=False)
    first = world.revision()
    assert _probes(world) == 600
    for deadline, probes in (("90m", 2700), ("3h", 5400)):
        world.change(rollout={"progressDeadline": deadline, "drainTimeout": "5m"})
        assert _probes(world) == probes
        assert world.deployment()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 320
        assert world.revision() != first
        world.roll_out(ready=False)
    patient = world.revision()
    world.change(rollout={"progressDeadline": "10m"})
    assert world.revision() == patient, "a lowered one restarts no pod that still loads"
    world.roll_out()
    world.reconcile()
    world.report()
    world.change(rollout={"progressDeadline": "9h"})
    assert world.revision() == patient, "its pods have shown that they start in time"


def test_deadline_raised_while_all_pods_are_lost_is_no_rollout() -> None:
    """Pods that were ready once start again after a loss of nodes as they are."""
    world = World(manifest()).served()
    revision = world.revision()
    for pod in world.pods.values():
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.change(rollout={"progressDeadline": "90m"})
    assert world.revision() == revision


def test_ready_revision_survives_a_crd_without_its_field() -> None:
    """A CRD of an earlier release prunes status.readyRevision: a raised deadline then reloaded pods that had served."""
    world = World(manifest()).served()
    revision = world.revision()
    for pod in world.pods.values():
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.services["chat"]["status"].pop("readyRevision")
    world.patch(rollout={"progressDeadline": "90m"})
    world.reconcile()
    assert world.revision() == revision
    assert world.services["chat"]["status"]["readyRevision"] == revision


def test_ready_revision_is_not_taken_from_any_text() -> None:
    world = World(manifest()).settled()
    world.deployment()["metadata"]["annotations"]["outrider.dev/ready-revision"] = "x" * 100_000
    world.settle()
    assert world.services["chat"]["status"].get("readyRevision", "") == ""


def test_a_lost_map_of_a_patient_revision_restarts_nothing() -> None:
    """Its name tells its times, so that its ConfigMap can be made again."""
    world = World(manifest()).settled()
    world.roll_out(ready=False)
    world.change(rollout={"progressDeadline": "90m"})
    world.replace_pods()
    revision = world.revision()
    del world.objects[CONFIG_MAP, f"chat-{revision}"]
    world.settle()
    assert world.revision() == revision
    assert (CONFIG_MAP, f"chat-{revision}") in world.objects
