"""The gateway's examples lead to the operator's InferencePool, and scrape where pods have their metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from outrider_crds.runtime_config import ADMIN_PORT, METRICS_PATH

from tests.unit.operator.decide.world import World, manifest

EXAMPLES = Path(__file__).parents[5] / "examples" / "gateway"


def _pool(world: World) -> dict[str, Any]:
    (pool,) = [document for (kind, _), document in world.objects.items() if kind == "InferencePool"]
    return pool


def _world() -> World:
    world = World(manifest("llama-chat", gateway={"inferencePool": True}))
    world.settle("llama-chat")
    world.roll_out("llama-chat")
    world.settle("llama-chat")
    return world


def test_pool_selects_serving_pods_and_no_profiling_ones() -> None:
    """A Job's pod in the pool would get requests that it cannot answer."""
    world = _world()
    selector = _pool(world)["spec"]["selector"]["matchLabels"].items()
    pods = [world.deployment("llama-chat")["spec"]["template"]["metadata"]["labels"]]
    jobs = [world.objects["Job", name]["spec"]["template"]["metadata"]["labels"] for name in world.jobs()]
    assert all(selector <= labels.items() for labels in pods)
    assert jobs
    assert not any(selector <= labels.items() for labels in jobs)


def test_route_leads_to_the_pool_that_the_operator_makes() -> None:
    pool = _pool(_world())
    route = yaml.safe_load((EXAMPLES / "httproute.yaml").read_text())
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["group"], backend["kind"], backend["name"]) == (
        pool["apiVersion"].partition("/")[0], pool["kind"], pool["metadata"]["name"],
    )  # fmt: skip


def test_picker_reads_the_metrics_where_pods_have_them() -> None:
    picker = yaml.safe_load((EXAMPLES / "endpoint-picker-config.yaml").read_text())
    source = next(plugin["parameters"] for plugin in picker["plugins"] if plugin["type"] == "metrics-data-source")
    assert (source["port"], source["path"]) == (ADMIN_PORT, METRICS_PATH)
    types = {plugin["type"] for plugin in picker["plugins"]}
    assert {use["pluginRef"] for profile in picker["schedulingProfiles"] for use in profile["plugins"]} <= types
