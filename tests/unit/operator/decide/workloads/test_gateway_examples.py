"""The gateway's examples select the pods that the operator makes, and scrape where these have their metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from outrider_crds.runtime_config import ADMIN_PORT, METRICS_PATH, SERVING_PORT

from tests.unit.operator.decide.world import World, manifest

EXAMPLES = Path(__file__).parents[5] / "examples" / "gateway"


def _pool() -> dict[str, Any]:
    documents = yaml.safe_load_all((EXAMPLES / "inferencepool.yaml").read_text())
    spec: dict[str, Any] = next(document["spec"] for document in documents if document["kind"] == "InferencePool")
    return spec


def test_pool_selects_serving_pods_and_no_profiling_ones() -> None:
    """A Job's pod in the pool would get requests that it cannot answer."""
    world = World(manifest("llama-chat"))
    world.settle("llama-chat")
    world.roll_out("llama-chat")
    world.settle("llama-chat")
    selector = _pool()["selector"]["matchLabels"].items()
    pods = [world.deployment("llama-chat")["spec"]["template"]["metadata"]["labels"]]
    jobs = [world.objects["Job", name]["spec"]["template"]["metadata"]["labels"] for name in world.jobs()]
    assert all(selector <= labels.items() for labels in pods)
    assert jobs
    assert not any(selector <= labels.items() for labels in jobs)


def test_gateway_and_picker_use_the_pods_ports() -> None:
    picker = yaml.safe_load((EXAMPLES / "endpoint-picker-config.yaml").read_text())
    source = next(plugin["parameters"] for plugin in picker["plugins"] if plugin["type"] == "metrics-data-source")
    assert _pool()["targetPorts"] == [{"number": SERVING_PORT}]
    assert (source["port"], source["path"]) == (ADMIN_PORT, METRICS_PATH)
    types = {plugin["type"] for plugin in picker["plugins"]}
    assert {use["pluginRef"] for profile in picker["schedulingProfiles"] for use in profile["plugins"]} <= types
