"""Which runtime image a service runs on when a new release is installed, and how a fleet moves to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.conditions import ConditionType as C
from outrider_operator.decide.desired.desired_state import IMAGE_ANNOTATION, pinned_image

from tests.unit.operator.decide.world import SETTINGS, World, manifest, settings_with

NEW = settings_with(runtime_image_gpu="outrider/runtime:2", runtime_image_cpu="outrider/runtime-cpu:2")


def image(world: World) -> str:
    containers = world.deployment()["spec"]["template"]["spec"]["containers"]
    return str(containers[0]["image"])


def test_service_with_an_old_image_says_so_and_moves_on_request() -> None:
    """It moves by an ordinary rollout to a new revision, and stays there when the annotation goes."""
    world = World(manifest()).served()
    assert world.observed().status.newer_runtime_image == ""
    world.settings = NEW
    world.settle()
    assert (image(world), world.observed().status.newer_runtime_image) == (
        "outrider/runtime-cpu:1", "outrider/runtime-cpu:2",
    )  # fmt: skip
    before = world.revision()
    behind = world.observed().status.newer_runtime_image
    world.services["chat"]["metadata"]["annotations"] = {"outrider.dev/runtime-upgrade": behind}
    world.settle()
    assert (image(world), world.observed().status.newer_runtime_image) == ("outrider/runtime-cpu:2", "")
    assert world.observed().status.runtime_image == "outrider/runtime-cpu:2"
    assert world.revision() != before
    world.services["chat"]["metadata"]["annotations"] = {}
    world.settle()
    assert image(world) == "outrider/runtime-cpu:2"


@pytest.mark.parametrize("choice", ["outrider/runtime-cpu:2", "2"])
def test_an_upgrade_names_a_release_and_no_later_one(choice: str) -> None:
    """A later `helm upgrade` restarted just those services that had been moved by hand, at once."""
    world = World(manifest()).served()
    world.services["chat"]["metadata"]["annotations"] = {"outrider.dev/runtime-upgrade": choice}
    world.settings = NEW
    world.settle()
    assert image(world) == "outrider/runtime-cpu:2"
    world.settings = settings_with(runtime_image_gpu="outrider/runtime:3", runtime_image_cpu="outrider/runtime-cpu:3")
    world.settle()
    assert image(world) == "outrider/runtime-cpu:2"
    assert world.observed().status.newer_runtime_image == "outrider/runtime-cpu:3"


@pytest.mark.parametrize("choice", ["true", "3", "runtime-cpu", "", "cpu:2"])
def test_what_names_no_installed_release_moves_nothing(choice: str) -> None:
    world = World(manifest()).served()
    world.services["chat"]["metadata"]["annotations"] = {"outrider.dev/runtime-upgrade": choice}
    world.settings = NEW
    world.settle()
    assert image(world) == "outrider/runtime-cpu:1"


@given(uid=st.uuids().map(str), smaller=st.integers(0, 100), larger=st.integers(0, 100))
def test_a_larger_share_holds_every_service_of_a_smaller_one(uid: str, smaller: int, larger: int) -> None:
    """The choice depends only on the uid: no service moves back while a fleet is upgraded step by step."""
    smaller, larger = sorted((smaller, larger))
    service = {"metadata": {"name": "chat", "namespace": "a", "uid": uid}}

    def moves(percent: int) -> bool:
        settings = NEW.model_copy(update={"runtime_upgrade_percent": percent})
        return pinned_image(service, None, "old:1", settings, on_cpu=True) == "outrider/runtime-cpu:2"

    assert moves(100)
    assert not moves(0)
    assert moves(larger) or not moves(smaller)


def test_upgrade_share_has_its_size_and_an_annotation_opts_out() -> None:
    metadata = [{"name": "chat", "namespace": "a", "uid": f"{number}"} for number in range(1000)]
    settings = NEW.model_copy(update={"runtime_upgrade_percent": 30})

    def moved(**more: object) -> int:
        services = [{"metadata": {**service, **more}} for service in metadata]
        images = [pinned_image(service, None, "old:1", settings, on_cpu=True) for service in services]
        return images.count("outrider/runtime-cpu:2")

    assert 250 <= moved() <= 350
    assert moved(annotations={"outrider.dev/runtime-upgrade": "false"}) == 0


def test_a_service_with_an_image_of_its_own_is_not_behind() -> None:
    world = World(manifest(podTemplate={"image": "mine:1"})).served()
    world.settings = NEW
    world.settle()
    assert world.observed().status.newer_runtime_image == ""


@pytest.mark.parametrize("typed", ["a" * 257, "b" * 300, "two words", "umlaut:\u00e4"])
def test_image_that_the_status_cannot_hold_is_not_taken(typed: str) -> None:
    """The API server would refuse the status for ever; what the service ran on stands in it."""
    world = World(manifest()).served()
    world.settings = NEW
    revision = world.revision()
    world.deployment()["metadata"]["annotations"][IMAGE_ANNOTATION] = f"cpu {typed}"
    world.settle()
    assert (world.revision(), image(world)) == (revision, "outrider/runtime-cpu:1")
    assert world.observed().status.runtime_image == "outrider/runtime-cpu:1"
    assert world.deployment()["metadata"]["annotations"][IMAGE_ANNOTATION] == "cpu outrider/runtime-cpu:1"
    assert pinned_image({"metadata": {"uid": "a"}}, world.deployment(), "", SETTINGS, on_cpu=True) == (
        "outrider/runtime-cpu:1"
    )


def images(world: World) -> tuple[str, str, str]:
    """What the Deployment, and the two fields of the status, say."""
    status = world.observed().status
    noted = str(world.deployment()["metadata"]["annotations"][IMAGE_ANNOTATION])
    return noted, status.runtime_image, status.newer_runtime_image


BEHIND = ("cpu outrider/runtime-cpu:1", "outrider/runtime-cpu:1", "outrider/runtime-cpu:2")
MOVED = ("cpu outrider/runtime-cpu:2", "outrider/runtime-cpu:2", "")


def test_a_paused_service_is_behind_until_it_goes_on() -> None:
    """Its pods run the old image whatever the installation upgrades."""
    world = World(manifest()).served()
    world.patch(paused=True)
    world.settings = NEW.model_copy(update={"runtime_upgrade_percent": 100})
    world.settle()
    assert (image(world), *images(world)) == ("outrider/runtime-cpu:1", *BEHIND)
    world.change(paused=False)
    assert (image(world), *images(world)) == ("outrider/runtime-cpu:2", *MOVED)


def test_service_that_waits_for_a_new_images_profile_is_behind() -> None:
    """And it keeps the old image if the installation upgrades nothing any more meanwhile."""
    world = World(manifest(profiling={"mode": "Required"})).settled()
    world.profile(world.jobs()[0])
    world.roll_out()
    world.settings = NEW.model_copy(update={"runtime_upgrade_percent": 100})
    world.settle()
    assert world.reason(C.UPDATED) == "False/WaitingForProfile"
    assert (image(world), *images(world)) == ("outrider/runtime-cpu:1", *BEHIND)
    world.settings = NEW
    world.settle()
    assert world.reason(C.PROFILES_READY) == "True/Profiled"
    assert (image(world), *images(world)) == ("outrider/runtime-cpu:1", *BEHIND)
    world.settings = NEW.model_copy(update={"runtime_upgrade_percent": 100})
    world.settle()
    world.profile(world.jobs()[0])
    assert (image(world), *images(world)) == ("outrider/runtime-cpu:2", *MOVED)
