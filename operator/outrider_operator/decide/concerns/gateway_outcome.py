"""The concern of the gateway: the InferencePool of the serving pods. Nothing else depends on it.

No other child waits for the pool: the pods are behind their Service as well.
"""

from __future__ import annotations

from dataclasses import replace

from outrider_crds.conditions import ConditionReason, ConditionStatus, ConditionType
from outrider_crds.runtime_config import SERVING_PORT
from outrider_crds.spec import Gateway, SpeculativeServiceSpec

from outrider_operator import cluster_model
from outrider_operator.cluster_model import KindAccess, Object
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.drift import needs_apply, stamp
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import ConcernOutcome, Verdict, false, true, unknown
from outrider_operator.decide.ownership import Children, Ownership, child_document, controller_name, selector
from outrider_operator.validation.reading import cut, integer, items, mapping, text

PICKER_PORT = 9002
"""Port of an endpoint picker's gRPC service, llm-d's default."""
_LOOK_S = 60.0
"""No watch tells when the extension is installed, or when a gateway takes the pool."""
_EXTENSION = "the Gateway API Inference Extension (inference.networking.k8s.io/v1)"


def gateway(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """The InferencePool, and condition InferencePoolReady."""
    children, spec = world.children, intent.spec
    ready = _pool_ready(world, spec)
    outcome = ConcernOutcome(conditions={ConditionType.INFERENCE_POOL_READY: ready})
    if not spec.gateway.inference_pool:
        own = children.own(cluster_model.INFERENCE_POOL, children.owner.name) if intent.scales else None
        return replace(outcome, unwanted=(own,) if own is not None else ())
    if ready.status is not ConditionStatus.TRUE:
        outcome = replace(outcome, wake_after_s=_LOOK_S)
    if not intent.scales or world.observed.pool_access is not KindAccess.SERVED:
        return outcome
    return replace(outcome, objects=(stamp(_pool(children.owner, spec.gateway)),))


def picker_peers(children: Children, spec: SpeculativeServiceSpec) -> tuple[Object, ...]:
    """NetworkPolicyPeers of the endpoint picker's pods, which read the metrics of the pods that they choose among."""
    if not spec.gateway.inference_pool:
        return ()
    name = cluster_model.picker_name(children.owner.name, spec.gateway.endpoint_picker)
    pods = mapping(children.documents.get((cluster_model.KUBERNETES_SERVICE, name)) or {}, "spec", "selector")
    return ({"podSelector": {"matchLabels": dict(pods)}},) if pods else ()


def _pool(owner: cluster_model.ServiceIdentity, gateway: Gateway) -> Object:
    """The InferencePool. It selects the pods of a rollout and of a canary too, as the Service does."""
    picker = {
        "group": "",
        "kind": cluster_model.KUBERNETES_SERVICE,
        "name": cluster_model.picker_name(owner.name, gateway.endpoint_picker),
        "port": {"number": PICKER_PORT},
        "failureMode": "FailOpen",  # requests go on without the picker, as they do without a gateway
    }
    spec = {
        "selector": {"matchLabels": selector(owner.name)},
        "targetPorts": [{"number": SERVING_PORT}],
        "endpointPickerRef": picker,
    }
    return child_document(owner, cluster_model.INFERENCE_POOL, owner.name, spec=spec)


def _pool_ready(world: ServiceWorld, spec: SpeculativeServiceSpec) -> Verdict:
    """Condition InferencePoolReady."""
    access = world.observed.pool_access
    refusals = (refusal for refusal in world.observed.refusals if refusal.kind == cluster_model.INFERENCE_POOL)
    refused = next((refusal for refusal in refusals if not refusal.is_stored), None)
    if not spec.gateway.inference_pool:
        return _not_requested(world.children, access, refused)
    if access is KindAccess.FORBIDDEN:
        what = "This operator has no right to read InferencePools: install the chart of its own release."
        return false(ConditionReason.CHILD_REJECTED, what)
    if access is KindAccess.NOT_INSTALLED:
        what = f"This cluster does not have {_EXTENSION}: install its CRDs, or remove gateway.inferencePool."
        return false(ConditionReason.NOT_INSTALLED, what)
    if refused is not None:
        said = _said(refused)
        return false(ConditionReason.CHILD_REJECTED, cut(f"The API server refuses the InferencePool: {said}.", 2048))
    return _written(world.children, spec)


def _not_requested(children: Children, access: KindAccess, refused: cluster_model.ApiRefusal | None) -> Verdict:
    """NotRequested ends the search for a pool, so it is said only when none of the service's own is left."""
    name = children.owner.name
    if access is KindAccess.FORBIDDEN:
        what = f"gateway.inferencePool is false. InferencePool {name} may be left: this operator has no right to look."
        return unknown(ConditionReason.PENDING, what)
    if children.ownership(cluster_model.INFERENCE_POOL, name) not in (Ownership.OURS, Ownership.TERMINATING):
        return unknown(ConditionReason.NOT_REQUESTED, "gateway.inferencePool is false.")
    why = f" The API server refuses its deletion: {_said(refused)}." if refused is not None else ""
    what = f"gateway.inferencePool is false, and InferencePool {name} has yet to be deleted.{why}"
    return unknown(ConditionReason.PENDING, cut(what, 2048))


def _said(refused: cluster_model.ApiRefusal) -> str:
    return refused.message.strip().rstrip(".")


def _written(children: Children, spec: SpeculativeServiceSpec) -> Verdict:
    name = children.owner.name
    if children.ownership(cluster_model.INFERENCE_POOL, name) is Ownership.FOREIGN:
        owner = controller_name(children.documents[cluster_model.INFERENCE_POOL, name])
        whose = f"belongs to {owner}" if owner else "was not made by Outrider"
        what = f"InferencePool {name} {whose} and is left alone. Delete it, or remove gateway.inferencePool."
        return false(ConditionReason.NAME_CONFLICT, what)
    own = children.own(cluster_model.INFERENCE_POOL, name)
    if own is None or needs_apply(own, stamp(_pool(children.owner, spec.gateway))):
        return unknown(ConditionReason.PENDING, f"InferencePool {name} is being written.")
    picker = cluster_model.picker_name(name, spec.gateway.endpoint_picker)
    if (cluster_model.KUBERNETES_SERVICE, picker) in children.documents:
        return _accepted(own, f"Service {picker} picks among its pods.")
    return _accepted(own, f"There is no Service {picker} to pick among its pods; gateways choose by themselves.")


def _accepted(pool: Object, picker_sentence: str) -> Verdict:
    """Verdict by what the gateways report of the pool: that it is written does not mean that any routes to it."""
    name = text(pool, "metadata", "name")
    gateways = [parent for parent in items(pool, "status", "parents") if _is_of_controller(parent)]
    if not gateways:
        what = f"InferencePool {name} is written, and no gateway reports it: name it in an HTTPRoute."
        return unknown(ConditionReason.NOT_ATTACHED, f"{what} {picker_sentence}")
    generation = integer(pool, "metadata", "generation")
    refusals = (_objection(parent, generation) for parent in gateways)
    if objection := next((sentence for sentence in refusals if sentence), ""):
        return false(ConditionReason.NOT_ACCEPTED, cut(f"{objection} {picker_sentence}", 2048))
    names = cut(", ".join(sorted(_gateway_name(parent) for parent in gateways)), 512)
    return true(ConditionReason.POOL_CURRENT, f"InferencePool {name} is accepted by {names}. {picker_sentence}")


def _is_of_controller(parent: Object) -> bool:
    """Was the entry written by a gateway's controller? Older CRDs store a placeholder of kind Status."""
    return text(parent, "parentRef", "kind") != "Status"


def _gateway_name(parent: Object) -> str:
    return f"{text(parent, 'parentRef', 'kind') or 'Gateway'} {text(parent, 'parentRef', 'name')}"


def _objection(parent: Object, generation: int) -> str:
    """What one gateway has against the pool, in a sentence; empty if it accepts the pool as it is written now."""
    name, conditions = _gateway_name(parent), items(parent, "conditions")
    for condition in conditions:
        kind, message = text(condition, "type"), text(condition, "message").strip().rstrip(".")
        if text(condition, "status") == "False":
            return f"{name} reports {kind}=False of the pool: {message or text(condition, 'reason')}."
        if 0 < integer(condition, "observedGeneration") < generation:
            return f"{name} has not looked at the pool since it was changed."
    is_accepted = any((text(c, "type"), text(c, "status")) == ("Accepted", "True") for c in conditions)
    return "" if is_accepted else f"{name} has not accepted the pool yet."
