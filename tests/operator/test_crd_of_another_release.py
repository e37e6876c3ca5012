"""The CRD is the cluster's, one for all releases: an operator goes on under one that is a release ahead or behind."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from outrider_crds.generate import CRD_FILE, CRD_NAME
from outrider_crds.runtime_config import CONFIG_KEY
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT

from tests.cluster.cluster import Cluster
from tests.operator.client import Service, uids, wait_for
from tests.operator.conftest import Make

pytestmark = pytest.mark.cluster

DEFAULTED = {"type": "string", "default": "Never", "maxLength": 16}
"""A field of a later release; the API server fills it in on every read."""

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def install(cluster: Cluster) -> Iterator[Callable[[Change], None]]:
    """install(change): the CRD as `change` leaves its schema."""

    def put(change: Change) -> None:
        document = yaml.safe_load(CRD_FILE.read_text())
        change(document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"])
        text = json.dumps(document)
        cluster.kubectl("replace", "-f", "-", stdin=text)
        cluster.wait_established(f"crd/{CRD_NAME}")

    yield put
    put(lambda _: None)


def ahead(schema: dict[str, Any]) -> None:
    """New defaulted fields at three depths, and one in the status."""
    spec = schema["spec"]["properties"]
    spec["canary"] = copy.deepcopy(DEFAULTED)
    spec["speculation"]["properties"]["adaptive"] = copy.deepcopy(DEFAULTED)
    spec["draftPool"]["items"]["properties"]["warmup"] = copy.deepcopy(DEFAULTED)
    schema["status"]["properties"]["canary"] = copy.deepcopy(DEFAULTED)


def behind(schema: dict[str, Any]) -> None:
    """Lacks fields that this release knows, each with a default of its own."""
    spec = schema["spec"]["properties"]
    del spec["speculation"]["properties"]["draftPrefill"]
    spec["speculation"].get("default", {}).pop("draftPrefill", None)
    del spec["draftPool"]["items"]["properties"]["paused"]
    for field in ("newerRuntimeImage", "summary"):
        del schema["status"]["properties"][field]


@pytest.mark.parametrize("change", [ahead, behind])
def test_services_go_on_under_another_releases_crd(
    make: Make, install: Callable[[Change], None], change: Change
) -> None:
    """A field with a default froze every service: InvalidSpec, no scale, no kill switch, until the next operator."""
    service = make(f"crd-{change.__name__}", profiling={"mode": "Skip"}, replicas=1)
    service.wait_updated()
    pods = uids(service.ready_pods())
    install(change)
    if change is ahead:
        wait_for("the default of the new field", lambda: _warmup(service) == "Never")
    service.patch({"replicas": 2, "speculation": {"mode": "Off"}, "sloClasses": [{"name": "chat", "tpot": "70ms"}]})
    service.wait_updated()
    assert service.condition("SpecValid")["status"] == "True"
    assert service.child(DEPLOYMENT)["spec"]["replicas"] == 2
    assert _hot(service)["mode"] == "Off"
    assert pods <= uids(service.ready_pods())
    newcomer = make(f"new-{change.__name__}", profiling={"mode": "Skip"}, replicas=1)
    newcomer.wait_updated()
    install(lambda _: None)
    service.patch({"replicas": 1})
    wait_for("the scale of the spec", lambda: service.child(DEPLOYMENT)["spec"]["replicas"] == 1)
    service.wait_updated()


def _warmup(service: Service) -> str:
    """The field of a later release; empty while the API server does not fill it in."""
    value: str = service.read()["spec"]["draftPool"][0].get("warmup", "")
    return value


def _hot(service: Service) -> dict[str, Any]:
    data = service.child(CONFIG_MAP, f"{service.name}-hot")["data"]
    hot: dict[str, Any] = json.loads(data[CONFIG_KEY])
    return hot
