"""Two writers of spec.replicas: an autoscaler and a manifest in Git undo what the other did, and the status says so."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.conditions import ConditionType
from outrider_operator.cluster_model import REPLICA_WRITER
from outrider_operator.kinds import SERVICE
from outrider_operator.validation.managed_fields import CONTEST_S, ReplicaWriter, newest_writer, noted, rivals
from outrider_operator.validation.objects import admit

from tests.unit.operator.decide.world import World, manifest

HPA, GIT = "kube-controller-manager", "argocd-controller"


def _turns(*managers: str, every_s: float = 180.0) -> tuple[ReplicaWriter, ...]:
    turns: tuple[ReplicaWriter, ...] = ()
    for number, manager in enumerate(managers):
        turns = noted(turns, manager, 1_000.0 + number * every_s)
    return turns


def _entry(manager: str, at: str, **fields: Any) -> dict[str, Any]:
    return {"manager": manager, "operation": "Update", "time": at, "fieldsV1": {"f:spec": fields}}


def test_an_autoscaler_and_a_manifest_that_take_turns_are_rivals() -> None:
    """Each look in between sees the writer of the one before; it is no turn."""
    assert rivals(_turns(HPA, GIT, GIT, HPA, HPA, GIT)) == (GIT, HPA)


@pytest.mark.parametrize(
    "managers",
    [(HPA,) * 9, (HPA, "kubectl", HPA), ("", "kubectl", "", HPA), ("helm", HPA, "kubectl", HPA)],
    ids=["autoscaler", "a-person-once", "defaulted", "three-writers"],
)
def test_ordinary_scaling_is_no_contest(managers: tuple[str, ...]) -> None:
    assert rivals(_turns(*managers)) == ()


def test_a_contest_of_rare_turns_is_noticed() -> None:
    """Git that is written once an hour, and an autoscaler that scales up for an hour in between."""
    assert rivals(_turns(HPA, GIT, HPA, GIT, every_s=3600.0)) == (GIT, HPA)


def test_a_contest_that_has_ended_is_forgotten() -> None:
    turns = _turns(HPA, GIT, HPA, GIT)
    assert rivals(noted(turns, GIT, turns[-1].at + 1)) == (GIT, HPA)
    assert rivals(noted(turns, GIT, turns[0].at + CONTEST_S)) == ()
    assert rivals(_turns(HPA, GIT, HPA, GIT, every_s=CONTEST_S / 2)) == ()


def test_writer_is_the_manager_of_the_fields_newest_entry() -> None:
    """Two managers own one value if both wrote the same; entries of other fields, or broken ones, are none's."""
    replicas: dict[str, Any] = {"f:replicas": {}}
    entries = [
        _entry(GIT, "2026-01-01T00:00:01Z", **replicas),
        _entry(HPA, "2026-01-01T00:00:02Z", **replicas),
        _entry("kubectl", "2026-01-01T00:00:03Z", **{"f:paused": {}}),
        {"manager": "broken", "fieldsV1": {"f:spec": ["f:replicas"]}},
        {"manager": "none"},
    ]
    assert newest_writer(entries, "spec", "replicas") == HPA
    assert newest_writer(entries[2:], "spec", "replicas") == ""
    assert newest_writer([{**entries[1], "manager": None}], "spec", "replicas") == ""
    offset = _entry(GIT, "2026-11-20T13:00:00+02:00", **{"f:replicas": {}})
    noon = _entry(HPA, "2026-11-20T12:00:00Z", **{"f:replicas": {}})
    assert newest_writer([offset, noon], "spec", "replicas") == HPA, "times, not texts"


def test_cache_keeps_the_writer_and_no_managed_fields() -> None:
    service = manifest()
    service["metadata"]["managedFields"] = [_entry(HPA, "2026-01-01T00:00:01Z", **{"f:replicas": {}})]
    kept = admit(SERVICE, service)
    assert isinstance(kept, dict)
    assert kept[REPLICA_WRITER] == HPA
    assert "managedFields" not in kept["metadata"]
    service["metadata"]["managedFields"] = ["broken"]
    unknown = admit(SERVICE, service)
    assert isinstance(unknown, dict)
    assert REPLICA_WRITER not in unknown


def test_rivals_are_named_and_everything_else_goes_on() -> None:
    """The pods came and went, each change a good one, and no condition said why."""
    world = World(manifest(replicas=2)).served()
    before = world.deployment()
    world.replica_rivals = (GIT, HPA)
    world.settle()
    accepted = world.condition(ConditionType.SPEC_VALID)
    assert (accepted.status, accepted.reason) == ("True", "Accepted")
    assert f"{GIT} and {HPA} set spec.replicas in turn" in accepted.message
    assert world.deployment() == before
    world.replica_rivals = ()
    world.settle()
    assert "in turn" not in world.condition(ConditionType.SPEC_VALID).message
