"""A cluster from the chart to answers: the real operator, and services of the real runtime with a real model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import yaml

from demo.chart import install_outrider
from demo.console import Console
from demo.load import Load
from demo.service import Follower, JsonObject, is_measured, is_true
from setup.steps import REPOSITORY
from tests.cluster.cluster import Cluster
from tests.cluster.spec import ClusterSpec

EXAMPLE = REPOSITORY / "examples" / "smollm2-cpu.yaml"
NAME = "smollm2"
TORCH_NAME = "smollm2-torch"
MODEL = "smollm2-135m-instruct"
PATIENCE_S = 1800.0  # a busy machine is slow, not wrong


def _hurried(manifest: Path) -> JsonObject:
    """The manifest for a machine on which several engines start at once: a shorter measurement, and threads that
    sleep while they wait for each other, instead of spinning on cores that the other engine needs."""
    document: JsonObject = yaml.safe_load(manifest.read_text())
    document["spec"]["profiling"]["timeBudget"] = "40s"
    document["spec"]["engine"]["env"].append({"name": "KMP_BLOCKTIME", "value": "0"})
    return document


@dataclass
class Service:
    """A service on the cluster of these tests."""

    cluster: Cluster
    name: str

    @cached_property
    def follower(self) -> Follower:
        return Follower(self.cluster.kubectl, Console(), self.name)

    def until_updated(self) -> JsonObject:
        """The service once ready pods run its newest generation and its profiles are measured."""
        return self.follower.follow_until(
            lambda service: is_true(service, "Ready", "Updated") and is_measured(service),
            timeout_s=PATIENCE_S, what="a profiled service with a ready pod",
        )  # fmt: skip

    def patch(self, patch: str) -> None:
        self.cluster.kubectl("patch", "specsvc", self.name, "--type=merge", "-p", patch)

    def pods(self) -> list[JsonObject]:
        pods: list[JsonObject] = self.cluster.get(
            "pods", selector=f"outrider.dev/service={self.name},outrider.dev/component=serving"
        )
        return pods

    @property
    def url(self) -> str:
        return f"http://{self.cluster.get('service', self.name)['spec']['clusterIP']}"

    @contextmanager
    def load(self, concurrency: int, thinking_s: float = 0.0) -> Generator[Load, None, None]:
        """Chat requests through the Service while the block runs; afterwards every one of them has ended."""
        classes = ("interactive", "batch")
        load = Load(self.url, MODEL, classes, max_tokens=48, concurrency=concurrency, thinking_s=thinking_s)
        thread = threading.Thread(target=lambda: asyncio.run(load.run()))
        thread.start()
        try:
            yield load
        finally:
            load.stop()
            thread.join()


@pytest.fixture(scope="package")
def installed(own_cluster_folder: Path) -> Generator[Cluster, None, None]:
    """A cluster on which helm has installed the operator, as a user would."""
    with Cluster(ClusterSpec(nodes=1), own_cluster_folder / "e2e") as own:
        install_outrider(own)
        yield own


@pytest.fixture(scope="module")
def service(installed: Cluster) -> Service:
    """The example's, on vLLM: Ready, Updated and profiled."""
    return _applied(installed, _hurried(EXAMPLE))


@pytest.fixture(scope="module")
def torch_service(installed: Cluster) -> Service:
    """The example's service on the bundled engine, which rolls out only once it is profiled."""
    document = _hurried(EXAMPLE)
    document["metadata"]["name"] = TORCH_NAME
    spec = document["spec"]
    spec["draftPool"] = spec["draftPool"][:1]
    spec["profiling"]["mode"] = "Required"
    spec["engine"] = {
        "backend": "Torch", "maxModelLen": 1024, "extraArgs": ["--max-num-seqs=8", "--max-num-batched-tokens=512"]
    }  # fmt: skip
    return _applied(installed, document)


def _applied(cluster: Cluster, document: JsonObject) -> Service:
    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(document))
    started = Service(cluster, document["metadata"]["name"])
    started.until_updated()
    return started
