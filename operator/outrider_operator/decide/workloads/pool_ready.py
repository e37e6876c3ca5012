"""Condition InferencePoolReady: can a gateway route to the service's pods? Nothing else depends on it."""

from __future__ import annotations

from collections.abc import Iterable

from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import ConditionReason

from outrider_operator.cluster_model import INFERENCE_POOL, KUBERNETES_SERVICE, ApiRefusal, KindAccess, picker_name
from outrider_operator.decide.drift import needs_apply, stamp
from outrider_operator.decide.ownership import Children, Ownership, controller_name
from outrider_operator.decide.verdict import Verdict, false, true, unknown
from outrider_operator.decide.workloads.inference_pool import inference_pool
from outrider_operator.validation.reading import cut

_EXTENSION = "the Gateway API Inference Extension (inference.networking.k8s.io/v1)"


def pool_ready(
    children: Children, spec: SpeculativeServiceSpec, access: KindAccess, refusals: Iterable[ApiRefusal]
) -> Verdict:
    """Condition InferencePoolReady."""
    refused = next((refusal for refusal in refusals if refusal.kind == INFERENCE_POOL and not refusal.is_stored), None)
    if not spec.gateway.inference_pool:
        return _not_requested(children, access, refused)
    if access is KindAccess.FORBIDDEN:
        what = "This operator has no right to read InferencePools: install the chart of its own release."
        return false(ConditionReason.CHILD_REJECTED, what)
    if access is KindAccess.NOT_INSTALLED:
        what = f"This cluster does not have {_EXTENSION}: install its CRDs, or remove gateway.inferencePool."
        return false(ConditionReason.NOT_INSTALLED, what)
    if refused is not None:
        said = _said(refused)
        return false(ConditionReason.CHILD_REJECTED, cut(f"The API server refuses the InferencePool: {said}.", 2048))
    return _made(children, spec)


def _not_requested(children: Children, access: KindAccess, refused: ApiRefusal | None) -> Verdict:
    """NotRequested ends the search for a pool, so it is said only when none of the service's own is left."""
    name = children.owner.name
    if access is KindAccess.FORBIDDEN:
        what = f"gateway.inferencePool is false. InferencePool {name} may be left: this operator has no right to look."
        return unknown(ConditionReason.PENDING, what)
    if children.ownership(INFERENCE_POOL, name) not in (Ownership.OURS, Ownership.TERMINATING):
        return unknown(ConditionReason.NOT_REQUESTED, "gateway.inferencePool is false.")
    why = f" The API server refuses its deletion: {_said(refused)}." if refused is not None else ""
    what = f"gateway.inferencePool is false, and InferencePool {name} has yet to be deleted.{why}"
    return unknown(ConditionReason.PENDING, cut(what, 2048))


def _said(refused: ApiRefusal) -> str:
    return refused.message.strip().rstrip(".")


def _made(children: Children, spec: SpeculativeServiceSpec) -> Verdict:
    name = children.owner.name
    if children.ownership(INFERENCE_POOL, name) is Ownership.FOREIGN:
        owner = controller_name(children.documents[INFERENCE_POOL, name])
        whose = f"belongs to {owner}" if owner else "was not made by Outrider"
        what = f"InferencePool {name} {whose} and is left alone. Delete it, or remove gateway.inferencePool."
        return false(ConditionReason.NAME_CONFLICT, what)
    if needs_apply(children.own(INFERENCE_POOL, name), stamp(inference_pool(children.owner, spec))):
        return unknown(ConditionReason.PENDING, f"InferencePool {name} is being written.")
    picker = picker_name(name, spec.gateway.endpoint_picker)
    if (KUBERNETES_SERVICE, picker) not in children.documents:
        what = f"InferencePool {name} names Service {picker} as its endpoint picker, and there is none."
        return true(ConditionReason.POOL_CURRENT, f"{what} Gateways choose pods by themselves until then.")
    return true(
        ConditionReason.POOL_CURRENT, f"InferencePool {name} selects the pods, and Service {picker} picks among them."
    )
