"""LoRA adapters of pods on a cluster: hot, reported by each pod, with figures, and none that fails the others."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_operator.kinds import DEPLOYMENT

from tests.operator.client import Service, uids, wait_for
from tests.operator.conftest import Make
from tests.operator.standin.state import MISFIT

pytestmark = pytest.mark.cluster


def _adapter(name: str) -> dict[str, Any]:
    return {"name": name, "source": {"folder": {"path": name}}}


@pytest.fixture(scope="module")
def service(make: Make) -> Service:
    """Two busy pods that may host adapters, without one."""
    lora = {"lora": {"volume": {"hostPath": {"path": "/srv"}}}}
    standin = {"tokens_per_s": 200, "misfit": "legal"}
    created = make("hosting", standin=standin, engine=lora, replicas=2, profiling={"mode": "Skip"})
    created.wait_updated()
    created.wait("AdaptersLoaded", "Unknown", "NoAdapters")
    return created


def _rows(service: Service) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in service.read()["status"].get("adapters", [])}


def test_an_adapter_is_loaded_by_running_pods_and_measured(service: Service) -> None:
    """No restart, no new revision; acceptance and attainment come from the pods' own counts."""
    before, revision = uids(service.pods()), service.revision
    service.patch({"adapters": [_adapter("support")]})
    assert "serves support" in service.wait("AdaptersLoaded", "True", "AllLoaded")["message"]
    row = wait_for("figures", lambda: _rows(service)["support"] if _rows(service)["support"].get("requests") else None)
    assert (row["loaded"], row["pods"]) == (True, "2/2")
    assert (float(row["acceptanceRate"]), float(row["attainmentPercent"])) == (0.5, 100.0)
    assert uids(service.pods()) == before
    assert service.revision == revision


def test_an_adapter_that_does_not_fit_lets_the_rest_serve(service: Service) -> None:
    """The condition names it with the pod's reason; the service is as ready as before."""
    generation = service.child(DEPLOYMENT)["metadata"]["generation"]
    service.patch({"adapters": [_adapter("support"), _adapter("legal")]})
    message = service.wait("AdaptersLoaded", "False", "NotLoaded")["message"]
    assert f"legal is not loaded: {MISFIT}" in message
    assert _rows(service)["legal"]["pods"] == "0/2"
    assert _rows(service)["support"]["loaded"]
    service.wait("Ready", "True")
    service.wait_updated()
    assert service.child(DEPLOYMENT)["metadata"]["generation"] == generation


def test_adapters_that_are_removed_leave_the_status(service: Service) -> None:
    service.patch({"adapters": []})
    service.wait("AdaptersLoaded", "Unknown", "NoAdapters")
    wait_for("no rows", lambda: not _rows(service))
