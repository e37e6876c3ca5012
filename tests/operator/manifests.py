"""SpeculativeServices for the operator's tests: small, on cpu, with the stand-in runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.cluster.images import OURS

STANDIN = f"{OURS}/checkout/tests/operator/standin/bin"
PATH = f"{STANDIN}:{OURS}/venv/bin:/usr/local/bin:/usr/bin:/bin"
IMAGE = "outrider.local/standin:dev"
LOOKUP = {"name": "lookup", "method": "PromptLookup", "promptLookup": {}}
EAGLE = {
    "name": "eagle",
    "method": "Eagle",
    "eagle": {"model": {"name": "tests/eagle", "source": {"hostPath": {"path": "/srv"}}}},
}
BLOCK = {
    "name": "flash",
    "method": "Block",
    "block": {"model": {"name": "tests/flash", "source": {"hostPath": {"path": "/srv"}}}, "maxTokens": 3},
}
MTP = {"name": "mtp", "method": "MTP", "mtp": {}}
CLASSES = [
    {"name": "chat", "tpot": "50ms", "objectivePercent": 90},
    {"name": "batch", "tpot": "500ms", "objectivePercent": 50},
]


def environment(**standin: object) -> list[dict[str, str]]:
    """The engine's environment that makes the stand-in run, and behave."""
    variables = {"PATH": PATH, **{f"STANDIN_{name.upper()}": str(value) for name, value in standin.items()}}
    return [{"name": name, "value": value} for name, value in variables.items()]


def service(name: str, namespace: str, *, standin: Mapping[str, object] | None = None, **spec: Any) -> dict[str, Any]:
    """A SpeculativeService of a target of its own (its name), so that no profile is shared by chance."""
    engine = {"env": environment(**(standin or {})), **spec.pop("engine", {})}
    return {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "target": {"name": f"tests/{name}", "source": {"hostPath": {"path": "/srv"}}},
            "draftPool": [LOOKUP],
            "accelerator": {"products": ["cpu"]},
            "sloClasses": CLASSES,
            "rollout": {"drainTimeout": "5s", "progressDeadline": "300s"},
            "engine": engine,
            **spec,
        },
    }


def on_gpu(products: list[str], **accelerator: Any) -> dict[str, Any]:
    return {"accelerator": {"products": products, **accelerator}}
