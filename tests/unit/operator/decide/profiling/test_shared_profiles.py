"""Profiles and Jobs that several services share: owner references and deletion."""

from __future__ import annotations

import copy

from outrider_crds.conditions import ConditionType as C
from outrider_operator.cluster_model import CONFIG_MAP, JOB
from outrider_operator.decide import decide
from outrider_operator.decide.desired.profile_store import Failure, Store, read_store, store_data
from outrider_operator.decide.ownership import owner_uids
from outrider_operator.decide.profiling.profile_maps import MAX_OWNERS

from tests.unit.operator.decide.world import World, manifest


def two_services() -> World:
    """Two services with one target and pool, rolled out, while their measurement runs."""
    world = World(manifest("one"), manifest("two"))
    for name in ("one", "two"):
        world.settle(name)
        world.roll_out(name)
    world.settle("one")
    world.settle("two")
    return world


def test_two_services_share_a_measurement_until_the_last_goes() -> None:
    """One Job, one ConfigMap with an owner reference of each; leaving removes only one's own."""
    world = two_services()
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


def test_profile_with_the_most_owners_is_still_used() -> None:
    """A profile of 204 services was too large for the operator, and no service had one any more."""
    world = World(manifest()).served()
    profile = next(d for (k, n), d in world.objects.items() if k == CONFIG_MAP and n.startswith("outrider-profile"))
    others = [{"uid": f"other-{number}"} for number in range(MAX_OWNERS)]
    profile["metadata"]["ownerReferences"] = others
    world.settle()
    assert profile["metadata"]["ownerReferences"] == others
    assert world.reason(C.PROFILES_READY) == "True/Profiled"
    profile["metadata"]["ownerReferences"] = others[1:]
    world.settle()
    assert "uid-chat" in owner_uids(profile)


def test_two_services_that_leave_at_once_delete_their_profile() -> None:
    """Each removed its own reference: the rest had no owner, and no later service could create it again."""
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


def test_profile_without_owner_is_adopted_by_a_service_in_need() -> None:
    """Its last user was deleted with --cascade=orphan."""
    world = World(manifest()).served()
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
    world = two_services()
    owners = world.objects[JOB, world.jobs()[0]]["metadata"]["ownerReferences"]
    assert [o["uid"] for o in owners] == ["uid-one", "uid-two"]


def test_a_job_without_users_is_stopped() -> None:
    """A changed target frees the accelerator, but not while another service still needs the measurement."""
    world = two_services()
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


def test_the_newest_failures_of_a_shared_profile_are_kept() -> None:
    store = Store()
    for n in range(200):
        store = store.with_failure(f"key{n}", "attempt", Failure(reason="Failed", message="no", job="uid"))
    store = store.with_failure("key150", "attempt", Failure(reason="Failed", message="again", job="uid"))
    kept = read_store({"data": store_data(store)})
    assert kept == store
    assert list(kept.failures)[-2:] == ["key199", "key150"]
    assert "key0" not in kept.failures
