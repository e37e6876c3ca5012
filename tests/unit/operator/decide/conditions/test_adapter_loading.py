"""Condition AdaptersLoaded, the rows of status.adapters, and what a change of adapters does to pods."""

from __future__ import annotations

from typing import Any

from outrider_crds.conditions import ConditionType
from outrider_crds.model_sources import AdapterVolume
from outrider_crds.runtime_config import HotConfig, adapters_folder
from outrider_crds.runtime_state import AdapterState
from outrider_operator.figure_windows import FigureWindows

from tests.unit.operator.decide.window_counts import adapter as counted
from tests.unit.operator.decide.window_counts import window_counts
from tests.unit.operator.decide.world import World, manifest

LORA = {"maxAdapters": 2, "volume": {"pvc": {"claimName": "adapters", "path": "llama"}}}


def adapter(name: str, folder: str = "one") -> dict[str, Any]:
    return {"name": name, "source": {"folder": {"path": folder}}}


def serving(*adapters: dict[str, Any]) -> World:
    return World(manifest(engine={"lora": LORA}, adapters=list(adapters))).served()


def verdict(world: World) -> tuple[str, str, str]:
    world.settle()
    condition = world.condition(ConditionType.ADAPTERS_LOADED)
    return condition.status, condition.reason, condition.message


def test_adapters_of_ready_pods_are_all_loaded() -> None:
    world = serving(adapter("support"))
    world.report_states(adapters=[AdapterState(name="support", loaded=True)])
    assert verdict(world) == ("True", "AllLoaded", "Every ready pod serves support.")
    (row,) = world.services["chat"]["status"]["adapters"]
    assert (row["loaded"], row["pods"], row["reason"]) == (True, "1/1", "")


def test_an_adapter_that_does_not_fit_leaves_all_else_as_it_is() -> None:
    """The sentence of the pod is in the condition and in the row; the service stays ready and up to date."""
    world = serving(adapter("support"), adapter("legal"))
    why = "legal has rank 64, and engine.lora.maxRank is 16"
    states = [AdapterState(name="support", loaded=True), AdapterState(name="legal", reason=why)]
    world.report_states(adapters=states)
    status, reason, message = verdict(world)
    assert (status, reason) == ("False", "NotLoaded")
    assert message == (
        f"Adapter legal is not loaded: {why}. The target and the other adapters serve on; it is tried again."
    )
    rows = {row["name"]: row for row in world.services["chat"]["status"]["adapters"]}
    assert rows["support"]["loaded"]
    assert (rows["legal"]["loaded"], rows["legal"]["pods"], rows["legal"]["reason"]) == (False, "0/1", why)
    for kind in (ConditionType.READY, ConditionType.UPDATED, ConditionType.AVAILABLE):
        assert world.condition(kind).status == "True"
    assert world.condition(ConditionType.STALLED).status == "False"


def test_an_adapter_that_no_pod_reports_is_being_loaded() -> None:
    world = serving(adapter("support"))
    assert verdict(world)[:2] == ("Unknown", "Loading")


def test_adapters_are_not_all_loaded_while_a_ready_pod_is_silent() -> None:
    """Bug: one pod of two that never reported was one of "every ready pod"."""
    world = World(manifest(replicas=2, engine={"lora": LORA}, adapters=[adapter("support")])).served()
    world.report_states(adapters=[AdapterState(name="support", loaded=True)])
    silent = next(iter(world.states))
    del world.states[silent]
    assert verdict(world) == ("Unknown", "Loading", f"Pods have not reported yet: {silent}.")


def test_a_service_without_adapters_has_no_verdict() -> None:
    world = World(manifest()).served()
    assert verdict(world)[:2] == ("Unknown", "NoAdapters")


def test_adapters_come_and_go_without_a_new_revision() -> None:
    """Only the hot config changes: pods of the same revision read it."""
    world = serving(adapter("support"))
    world.settle()
    before = world.revision()
    world.change(adapters=[adapter("support", "two"), adapter("legal")])
    assert world.revision() == before
    names = [spec.name for spec in hot(world).adapters or ()]
    assert names == ["support", "legal"]
    world.change(adapters=[])
    assert world.revision() == before
    assert hot(world).adapters is None


def test_room_for_adapters_makes_a_new_revision() -> None:
    world = serving(adapter("support"))
    world.settle()
    before = world.revision()
    world.change(engine={"lora": {**LORA, "maxRank": 64}})
    assert world.revision() != before


def test_serving_pods_mount_the_volume_of_adapters_read_only() -> None:
    world = serving(adapter("support"))
    pod = world.deployment()["spec"]["template"]["spec"]
    (volume,) = [v for v in pod["volumes"] if v["name"].endswith("model-adapters")]
    assert volume["persistentVolumeClaim"] == {"claimName": "adapters"}
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
    assert mount["mountPath"] == "/var/lib/outrider/models/adapters"
    assert mount["readOnly"]


def test_an_image_with_adapters_is_mounted_and_read_at_its_path() -> None:
    """Another image is another volume of the pod, and so another revision."""
    world = serving(adapter("support"))
    image = {"reference": "registry.example.com/adapters:1", "path": "/llama"}
    world.change(engine={"lora": {"volume": {"oci": image}}})
    before = world.revision()
    volumes = world.deployment()["spec"]["template"]["spec"]["volumes"]
    (volume,) = [v for v in volumes if v["name"].endswith("model-adapters")]
    assert volume["image"] == {"reference": image["reference"]}
    assert adapters_folder(AdapterVolume.model_validate({"oci": image})) == "/var/lib/outrider/models/adapters/llama"
    world.change(engine={"lora": {"volume": {"oci": {**image, "reference": "registry.example.com/adapters:2"}}}})
    assert world.revision() != before


def test_a_folder_of_the_node_that_is_not_allowed_is_refused() -> None:
    world = World(manifest(engine={"lora": {"volume": {"hostPath": {"path": "/etc"}}}})).settled()
    condition = world.condition(ConditionType.SPEC_VALID)
    assert condition.reason == "HostPathForbidden"
    assert "spec.engine.lora.volume names /etc" in condition.message


def test_figures_of_an_adapter_are_those_of_its_requests() -> None:
    """Acceptance and attainment by adapter, summed over SLO classes; too few tokens give no rate."""
    world = serving(adapter("support"), adapter("legal"))
    adapters = {"support": counted(400, 100, 40, 30), "legal": counted(10, 10)}
    world.figures = FigureWindows(window_counts(adapters=adapters))
    world.now += 60
    world.settle()
    support, legal = world.services["chat"]["status"]["adapters"]
    assert (support["acceptanceRate"], support["attainmentPercent"], support["requests"]) == ("0.25", "75", 40)
    assert (legal["acceptanceRate"], legal["attainmentPercent"], legal["requests"]) == ("", "", 0)


def hot(world: World) -> HotConfig:
    return HotConfig.read(world.objects["ConfigMap", "chat-hot"]["data"]["config.json"])
