"""The concern of the gateway: the InferencePool of the serving pods. Nothing else depends on it."""

from __future__ import annotations

from dataclasses import replace

from outrider_crds.status import ConditionType

from outrider_operator.cluster_model import INFERENCE_POOL, KindAccess
from outrider_operator.decide.drift import stamp
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import Outcome
from outrider_operator.decide.workloads.inference_pool import inference_pool
from outrider_operator.decide.workloads.pool_ready import pool_ready
from outrider_operator.decide.world import World

_EXTENSION_LOOK_S = 60.0
"""No watch tells when the extension is installed."""


def gateway(world: World, intent: Intent) -> Outcome:
    """The concern of the gateway: the InferencePool, and condition InferencePoolReady."""
    children, spec, access = world.children, intent.spec, world.observed.pool_access
    ready = pool_ready(children, spec, access, world.observed.refusals)
    outcome = Outcome(conditions={ConditionType.INFERENCE_POOL_READY: ready})
    if not intent.scales:
        return outcome
    if not spec.gateway.inference_pool:
        own = children.own(INFERENCE_POOL, children.owner.name)
        return replace(outcome, unwanted=(own,) if own is not None else ())
    if access is not KindAccess.SERVED:
        return replace(outcome, wake_after_s=_EXTENSION_LOOK_S)
    return replace(outcome, objects=(stamp(inference_pool(children.owner, spec)),))
