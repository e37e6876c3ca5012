"""Draft canaries on a real cluster: pools, and what is looked at."""

from __future__ import annotations

from typing import Any

from outrider_operator.kinds import DEPLOYMENT

from tests.operator.client import Service, wait_for


def head(name: str) -> dict[str, Any]:
    """A drafter of a model of its own."""
    model = {"name": f"tests/{name}", "source": {"hostPath": {"path": "/srv"}}}
    return {"name": name, "method": "Eagle", "eagle": {"model": model}}


GOOD, BAD = head("good"), head("bad")
CANARY: dict[str, Any] = {
    "strategy": "DraftCanary", "maxSurge": 1, "drainTimeout": "1s", "progressDeadline": "300s",
    "canary": {"minRequests": 20},
}  # fmt: skip
BUSY: dict[str, Any] = {"worse": "bad", "tokens_per_s": 100}
"""Behaviour of the stand-in: with BAD a candidate is worse, with any other it is better."""
COMMON: dict[str, Any] = {"profiling": {"mode": "Skip"}, "rollout": CANARY}


def rollout_of(service: Service) -> dict[str, Any]:
    rollout: dict[str, Any] = service.read()["status"].get("rollout", {})
    return rollout


def canary_pods(service: Service) -> list[dict[str, Any]]:
    return [pod for pod in service.pods() if pod["metadata"]["labels"].get("outrider.dev/track") == "canary"]


def has_canary(service: Service) -> bool:
    return service.client.get(DEPLOYMENT, service.namespace, f"{service.name}-canary") is not None


def wait_phase(service: Service, phase: str, cause: str = "") -> dict[str, Any]:
    """Wait until status.rollout has the phase and the cause; returns it."""

    def look() -> dict[str, Any] | None:
        rollout = rollout_of(service)
        return rollout if (rollout.get("phase"), rollout.get("cause", "")) == (phase, cause) else None

    try:
        return wait_for(f"{service.name}: {phase}/{cause}", look)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{service.read().get('status')}") from None


def wait_over(service: Service) -> None:
    """Wait until nothing is left of a canary."""
    wait_for(f"the canary of {service.name} to go", lambda: not canary_pods(service) and not has_canary(service))
