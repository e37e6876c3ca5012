"""Random manifests near a good one: parts are removed, nulled, swapped for other values, or set against each other."""

from __future__ import annotations

import copy
import random
from typing import Any

# Values that sit on both sides of some rule, by the field that they go into.
_VALUES: dict[str, list[Any]] = {
    "count": [1, 4, 0, 17, None],
    "tensorParallelSize": [1, 2, 4],
    "products": [["cpu"], ["NVIDIA-L4"], ["cpu", "NVIDIA-L4"], ["NVIDIA-L4", "NVIDIA-L4"], []],
    "resourceName": ["nvidia.com/gpu", "cpu", "memory", "a b"],
    "method": ["PromptLookup", "DraftModel", "Eagle", "SparseSelf", "Medusa", "Lookahead"],
    "name": ["lookup", "eagle", "chat", "batch", "a.b", "X", "x" * 41, 5],
    "tpot": ["0s", "0.0ms", "40ms", "1us", "100000h", "1d", "-1s", "", 5],
    "ttft": ["0s", "2s", None],
    "timeout": ["5m", "599s", "600s", "10m", "1h"],
    "timeBudget": ["0s", "10m", "600.001s", "59m60s", "1h0m0.1s"],
    "progressDeadline": ["9s", "9.999s", "10s", "1h"],
    "maxSurge": [0, 1, 101, "1"],
    "maxUnavailable": [0, 1],
    "mode": ["ClosedLoop", "Static", "Off", "Auto", "Required", "Skip", False],
    "draftPool": [[], None],
    "defaultSLOClass": ["chat", "batch", "none", None],
    "revision": ["main", None, ""],
    "source": [{}, {"hub": {}}, {"hostPath": {"path": "/a/../b"}}, {"hostPath": {"path": "/a..b"}}, None],
    "modelCache": [{}, None, {"emptyDir": {}}, {"emptyDir": {"sizeLimit": "1Gi"}}, {"emptyDir": {"sizeLimit": "1 G"}}],
    "extraArgs": [
        [], ["--max-num-seqs=4"], ["x"], ["--model=x"], ["--mod"], ["--model-impl", "x"], ["--worker_cls.a=b"],
        ["--data-parallel-rank", "0"], ["--nnodes"], ["--port"], ["--ports"], ["-q"], ["--"], ["--a", ""], ["--Model"],
    ],
    "env": [[{"name": "HOME"}], [{"name": "HOMES", "value": "x"}], [{"name": "OUTRIDER_X"}], [{"value": "x"}], []],
    "labels": [{"outrider.dev/x": "y"}, {"a.outrider.dev/x": "y"}, {"app.kubernetes.io/name": "x"}, {}, {"a": None}],
    "annotations": [{"outrider.dev/reprofile": "now"}, {"app.kubernetes.io/version": "1"}],
    "minTokens": [1, 5, 6, 0], "maxTokens": [1, 3, 16], "maxTreeDepth": [1, 2, 256, 257],
    "sparseSelf": [{}, None, {"windowTokens": 0}, {"windowTokens": 512}], "maxModelLen": [16, 511, 512, None],
    "draftModel": [{"model": {"name": "a"}}, {"model": {"name": "a"}, "windowTokens": 512}, {"windowTokens": 1}, None],
    "backend": ["vLLM", "Torch"], "windowTokens": [0, 1, 512, 10**6, 10**6 + 1, None],
    "limits": [{"nvidia.com/gpu": 1}, {"memory": "1Gi"}, {"cpu": 1.5}, {"cpu": True}],
    "objectivePercent": [0, 1, 100, 101], "replicas": [0, 1001, 2.0, 2.5],
}  # fmt: skip

# What no field expects, of every JSON type.
_ANYTHING: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "1",
    [],
    [None],
    [{}],
    ["x"],
    {},
    {"a": None},
    {"a": {}},
]


def mutated(manifest: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """A copy of `manifest` with one to three changes; about half of the results stay valid."""
    changed = copy.deepcopy(manifest)
    for _ in range(source.randint(1, 3)):
        places = _places(changed)
        if not places:
            break
        holder, key = source.choice(places)
        chance = source.random()
        if key in _VALUES and chance < 0.75:
            holder[key] = copy.deepcopy(source.choice(_VALUES[key]))
        elif chance < 0.85:
            holder[key] = copy.deepcopy(source.choice(_ANYTHING))
        else:
            del holder[key]
    return changed


def _places(value: Any, inside: str = "") -> list[tuple[dict[str, Any], str]]:
    """Every (mapping, key) of the manifest that may change; Kubernetes' own parts are left as they are."""
    if isinstance(value, list):
        return [place for item in value for place in _places(item, inside)]
    if not isinstance(value, dict) or inside in ("affinity", "tolerations", "volumes", "metadata"):
        return []
    places_here = [(value, key) for key in value if key not in ("apiVersion", "kind", "metadata", "spec")]
    return [*places_here, *(place for key, item in value.items() for place in _places(item, key))]
