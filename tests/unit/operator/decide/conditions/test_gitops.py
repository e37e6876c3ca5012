"""What Flux, Helm and Argo CD make of a service: by kstatus' rules, and by the health check that we ship."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua54 import LuaRuntime
from outrider_crds.generate import crd

from tests.unit.operator.decide.conditions.test_rollout_conditions import new_pod, rolling
from tests.unit.operator.decide.world import EAGLE, PLD, World, manifest

EXAMPLES = Path(__file__).parents[5] / "examples" / "gitops"
HEALTH = "resource.customizations.health.outrider.dev_SpeculativeService"


def kstatus(service: dict[str, Any]) -> str:
    """Status of a kind that kstatus has no rules of its own for, in the order of its checks."""
    if "deletionTimestamp" in service["metadata"]:
        return "Terminating"
    status = service.get("status") or {}
    if status.get("observedGeneration", service["metadata"]["generation"]) != service["metadata"]["generation"]:
        return "InProgress"
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions") or ()}
    for kind, outcome in (("Reconciling", "InProgress"), ("Stalled", "Failed")):
        if conditions.get(kind) == "True":
            return outcome
    return "Current" if conditions.get("Ready", "True") == "True" else "InProgress"


def argo_health(service: dict[str, Any]) -> str:
    """Status that Argo CD shows, by its own interpreter's language."""
    script = yaml.safe_load((EXAMPLES / "argocd-cm.yaml").read_text())["data"][HEALTH]
    lua = LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(service, recursive=True)
    health = lua.execute(script)
    assert isinstance(health["message"], str)
    return str(health["status"])


def _served(**spec: Any) -> World:
    return World(manifest(**spec)).served()


def _just_created() -> World:
    """A service as the API server stores it: with the CRD's default status."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return World({**manifest(), "status": schema["properties"]["status"]["default"]})


def _first_look() -> World:
    world = World(manifest())
    world.reconcile()
    return world


def _changed_and_not_looked_at() -> World:
    world = _served()
    world.services["chat"]["metadata"]["generation"] += 1
    return world


def _refused() -> World:
    world = _served(target={"name": "org/target", "source": {"hub": {"tokenSecretRef": {"name": "a"}}}})
    head = {"name": "org/eagle", "source": {"hub": {"tokenSecretRef": {"name": "b"}}}}
    world.change(draftPool=[PLD, {**EAGLE, "eagle": {"model": head}}])
    return world


def _rolling(**container: Any) -> World:
    world = rolling()
    new_pod(world, **container)
    world.settle()
    return world


def _paused_with_a_change() -> World:
    world = _served()
    world.change(paused=True, engine={"maxModelLen": 512})
    return world


def _pod_lost() -> World:
    world = _served()
    next(iter(world.pods.values()))["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.settle()
    return world


def _scaled_to_zero() -> World:
    world = _served()
    world.change(replicas=0)
    world.pods.clear()
    world.deployment()["status"] |= {"replicas": 0, "updatedReplicas": 0, "availableReplicas": 0}
    world.deployment()["status"]["observedGeneration"] = world.deployment()["metadata"]["generation"]
    world.settle()
    return world


CRASH = {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}}


@pytest.mark.parametrize(
    ("world", "by_kstatus", "by_argo"),
    [
        (_just_created, "InProgress", "Progressing"),
        (_first_look, "InProgress", "Progressing"),
        (_served, "Current", "Healthy"),
        (_changed_and_not_looked_at, "InProgress", "Progressing"),
        (_refused, "Failed", "Degraded"),
        (lambda: _rolling(state={"waiting": {"reason": "ContainerCreating"}}), "InProgress", "Progressing"),
        (lambda: _rolling(**CRASH), "Failed", "Degraded"),
        (_paused_with_a_change, "InProgress", "Suspended"),
        (_pod_lost, "InProgress", "Progressing"),
        (_scaled_to_zero, "InProgress", "Healthy"),
    ],
)
def test_tools_see_where_a_service_stands(world: Callable[[], World], by_kstatus: str, by_argo: str) -> None:
    """A patch that was refused or stuck was Current to Flux and Helm, and always healthy to Argo CD."""
    service = world().services["chat"]
    assert (kstatus(service), argo_health(service)) == (by_kstatus, by_argo)


def test_first_look_at_the_default_status_is_a_first_look() -> None:
    """The default of the CRD is no observation: the same status follows from it as from none."""
    created, without = _just_created(), World(manifest())
    assert created.reconcile().status == without.reconcile().status
    assert kstatus(created.services["chat"]) == "InProgress"


def test_health_of_a_service_without_a_status_is_progressing() -> None:
    service = manifest()
    assert argo_health(service) == "Progressing"
    assert argo_health({**service, "status": {"conditions": None}}) == "Progressing"


def test_reconciling_and_stalled_post_no_events() -> None:
    """Each repeats a condition that has an event for it."""
    world = _served()
    world.patch(paused=True, engine={"maxModelLen": 512})
    reasons = [event.reason for event in world.reconcile().events]
    assert [reason for reason in reasons if reason.startswith(("Reconciling", "Stalled"))] == []
    assert "UpdatedPaused" in reasons
