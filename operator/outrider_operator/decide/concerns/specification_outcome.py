"""The concern of the spec itself: condition SpecValid."""

from __future__ import annotations

from collections.abc import Iterable

from outrider_crds.conditions import ConditionReason, ConditionType

from outrider_operator.cluster_model import INFERENCE_POOL, SERVING, ApiRefusal, Observed
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import ConcernOutcome, Verdict, false, true
from outrider_operator.validation.reading import cut


def specification(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """Condition SpecValid."""
    return ConcernOutcome(conditions={ConditionType.SPEC_VALID: spec_valid(world.observed, intent.problem)})


def spec_valid(observed: Observed, problem: Verdict | None) -> Verdict:
    return refused(observed, problem) or _accepted(observed)


def refused(observed: Observed, problem: Verdict | None) -> Verdict | None:
    """Why the spec must not be applied, or why the API server refuses a child of it; None if neither is so."""
    refusals = (refusal for refusal in observed.refusals if refusal.component == SERVING)
    return problem or _child_rejected(
        refusal for refusal in refusals if not refusal.is_stored and refusal.kind != INFERENCE_POOL
    )


def _accepted(observed: Observed) -> Verdict:
    """Verdict on a spec that is applied. It names the first object that admission changed, and writers that undo each
    other's `spec.replicas`: both are easy to miss."""
    rewritten = next((refusal for refusal in observed.refusals if refusal.is_stored), None)
    rivals = " and ".join(observed.replica_rivals)
    sentences = ["The spec is accepted."]
    if rivals:
        sentences.append(f"{rivals} set spec.replicas in turn, so pods come and go: leave it to one.")
    if rewritten is not None:
        what = f"{rewritten.kind} {rewritten.name} is changed by the cluster after Outrider sends it"
        sentences.append(
            f"{what}: {rewritten.message}. "
            "An admission policy of the cluster, or another writer, changes it; it is sent again after growing pauses."
        )
    return true(ConditionReason.ACCEPTED, cut(" ".join(sentences), 2048))


def _child_rejected(refusals: Iterable[ApiRefusal]) -> Verdict | None:
    """Verdict on a spec of which the API server refuses a child: the first of `refusals`, if any."""
    first = next(iter(refusals), None)
    if first is None:
        return None
    sentence = (
        f"The API server refuses {first.kind} {first.name}: {first.message.strip().rstrip('.')}. Correct the spec"
    )
    return false(ConditionReason.CHILD_REJECTED, cut(f"{sentence}, or what forbids it; it is tried again.", 2048))
