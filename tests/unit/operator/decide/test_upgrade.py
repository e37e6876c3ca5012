"""An upgrade of the operator changes no pod: clusters as an earlier operator left them, recorded once it was idle.

tests/contracts/cluster-0.1 was recorded in the cluster in memory by the operator of 3ad3996d. The files never change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_crds.runtime_state import RuntimeState
from outrider_operator.cluster_model import DEPLOYMENT, LEADER_WORKER_SET, Node, Object

from tests.unit.operator.decide.world import World, copied

FOLDER = Path(__file__).parents[3] / "contracts/cluster-0.1"
PHASES = {
    "served": "",
    "downloaded": "",
    "groups": "",
    "held_rollout": "",
    "canary_measuring": "Measuring",
    "canary_failed": "Failed",
}
"""Recorded cluster -> phase of its canary."""


def recorded(name: str) -> World:
    """The cluster in memory as the earlier operator left it."""
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    world = World(*document["services"].values(), nodes=tuple(_node(node) for node in document["nodes"]))
    world.now = document["now"]
    world.objects = {(child["kind"], child["metadata"]["name"]): child for child in document["objects"]}
    for field in ("replica_sets", "pods", "workers", "job_pods"):
        setattr(world, field, document[field])
    world.states = {pod: RuntimeState.read(json.dumps(state)) for pod, state in document["states"].items()}
    return world


def _node(document: Object) -> Node:
    return Node(**{**document, "taints": tuple(document["taints"])})


def _workloads(world: World) -> dict[tuple[str, str], Object]:
    """What makes pods: spec of each Deployment and LeaderWorkerSet."""
    kinds = (DEPLOYMENT, LEADER_WORKER_SET)
    return {key: copied(document["spec"]) for key, document in world.objects.items() if key[0] in kinds}


@pytest.mark.parametrize("name", PHASES)
def test_upgraded_operator_changes_no_pod(name: str) -> None:
    world = recorded(name)
    before, objects = _workloads(world), set(world.objects)
    world.settle()
    assert _workloads(world) == before
    assert set(world.objects) == objects
    rollout = world.observed().status.rollout
    assert (rollout.phase if rollout is not None else "") == PHASES[name]


@pytest.mark.parametrize("name", ["served", "downloaded", "groups"])
def test_upgraded_operator_keeps_a_service_up_to_date(name: str) -> None:
    world = recorded(name)
    world.settle()
    assert world.reason(C.UPDATED) == "True/UpToDate"
    assert world.reason(C.PROGRESSING) == "False/Complete"
