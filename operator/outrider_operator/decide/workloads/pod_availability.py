"""Conditions Available and Ready: can users of the endpoint get answers?"""

from __future__ import annotations

from outrider_crds.status import ConditionReason

from outrider_operator.decide.pod_states import Pods
from outrider_operator.decide.service_world import ServiceWorld
from outrider_operator.decide.verdict import Verdict, false, true


def available(pods: Pods, replicas: int) -> Verdict:
    """True when at least spec.replicas pods are ready."""
    if replicas == 0:
        return true(ConditionReason.SCALED_TO_ZERO, "spec.replicas is 0.")
    count = len(pods.ready)
    if count >= replicas:
        return true(ConditionReason.ENOUGH_READY_PODS, f"{replicas} of {replicas} pods are ready.")
    return false(
        _reason(pods, ConditionReason.TOO_FEW_READY_PODS), _sentence(f"{count} of {replicas} pods are ready", pods)
    )


def endpoint_ready(world: ServiceWorld, replicas: int) -> Verdict:
    """True while at least one pod can answer. A pod of a draft canary answers as the others do."""
    pods, canaries = world.pods, world.canary_pods
    if replicas == 0:
        return false(ConditionReason.SCALED_TO_ZERO, "spec.replicas is 0: nothing answers.")
    if (pods.ready or canaries.ready) and not world.children.are_reachable:
        return false(
            ConditionReason.NO_READY_ENDPOINT,
            "Pods are ready, but no Service of Outrider's leads to them; see SpecValid.",
        )
    if pods.ready:
        return true(ConditionReason.ENDPOINT_READY, "At least one pod answers.")
    if canaries.ready:
        return true(ConditionReason.ENDPOINT_READY, f"A canary pod answers. {_sentence('No other pod is ready', pods)}")
    return false(_reason(pods, ConditionReason.NO_READY_ENDPOINT), _sentence("No pod is ready", pods))


def _reason(pods: Pods, otherwise: ConditionReason) -> ConditionReason:
    trouble = pods.trouble()
    return trouble.reason if trouble is not None else otherwise


def _sentence(start: str, pods: Pods) -> str:
    why = pods.why_not_ready().rstrip(".")
    return f"{start}. {why}." if why else f"{start}."
