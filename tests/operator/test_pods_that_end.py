"""What the kubelet says of a pod that ends for good, or never begins, reaches the service's conditions."""

from __future__ import annotations

from functools import partial

import pytest

from tests.operator.client import Service, wait_for
from tests.operator.conftest import Make

pytestmark = pytest.mark.cluster

SKIP = {"profiling": {"mode": "Skip"}}


def test_pods_evicted_in_a_row_say_why(make: Make) -> None:
    """A volume beyond its limit: 19 dead pods in 20 minutes, and no word of it."""
    cache = {"modelCache": {"emptyDir": {"sizeLimit": "1Ki"}}}
    service = make("evicted", standin={"fill_bytes": 1_000_000, "start_s": -1}, **cache, **SKIP)
    for kind, reason in (("Ready", "PodEnded"), ("Available", "PodEnded"), ("Progressing", "Stalled")):
        service.wait(kind, "False", reason)
        wait_for("the kubelet's words", partial(_says, service, kind, "exceeds the limit"))


def test_a_pod_without_its_secret_cannot_start(make: Make) -> None:
    """It was PodCrashing, and no container had ever run."""
    missing = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "nowhere", "key": "token"}}}
    service = make("secretless", podTemplate={"env": [missing]}, **SKIP)
    assert "nowhere" in service.wait("Ready", "False", "PodCannotStart")["message"]


def _says(service: Service, kind: str, words: str) -> bool:
    return words in service.condition(kind)["message"]
