"""Conditions Reconciling and Stalled, which Flux, Helm and Argo CD read by the rules of kstatus.

They follow from the other conditions. Reconciling is True while the spec is not in force on every pod. Stalled is True
if that cannot happen without a change by someone. At most one of them is True.
"""

from __future__ import annotations

from outrider_crds.status import ConditionReason, ConditionStatus, ConditionType

from outrider_operator.decide.verdict import Verdict, Verdicts, false, true

_STUCK = frozenset(
    {ConditionReason.STALLED, ConditionReason.NO_CAPACITY, ConditionReason.DRAFTER_NOT_LOADED}
    | {ConditionReason.CANARY_FAILED, ConditionReason.CANARY_ERROR, ConditionReason.CANARY_INCONCLUSIVE}
)
"""Reasons of Progressing that do not go away by waiting."""
_UNMEASURABLE = frozenset(
    {
        ConditionReason.PROFILE_FAILED,
        ConditionReason.NOISY,
        ConditionReason.NO_MATCHING_NODE,
        ConditionReason.VOCABULARY_MISMATCH,
    },
)
"""Reasons of ProfilesReady that do not go away by waiting. They stall a rollout that waits for its profile."""


def with_kstatus(verdicts: Verdicts) -> Verdicts:
    """`verdicts` plus Reconciling and Stalled."""
    cause = _stalled(verdicts)
    stalled = false(ConditionReason.NOT_STALLED, "Not stalled.") if cause is None else true(cause.reason, cause.message)
    return {
        **verdicts,
        ConditionType.RECONCILING: false(ConditionReason.STALLED, "See Stalled.") if cause else _reconciling(verdicts),
        ConditionType.STALLED: stalled,
    }


def _stalled(verdicts: Verdicts) -> Verdict | None:
    """The verdict that keeps the spec from being in force for good; None if none does."""
    spec, progress = verdicts[ConditionType.SPEC_VALID], verdicts[ConditionType.PROGRESSING]
    profiles = verdicts[ConditionType.PROFILES_READY]
    if spec.status is ConditionStatus.FALSE:
        return spec
    if progress.reason in _STUCK:
        return progress
    waits = progress.reason is ConditionReason.WAITING_FOR_PROFILE
    return profiles if waits and profiles.reason in _UNMEASURABLE else None


def _reconciling(verdicts: Verdicts) -> Verdict:
    """Reconciling while Updated or Available is not True: like a Deployment, missing pods count."""
    for kind in (ConditionType.UPDATED, ConditionType.AVAILABLE):
        if (verdict := verdicts[kind]).status is not ConditionStatus.TRUE:
            return true(verdict.reason, verdict.message)
    return false(ConditionReason.RECONCILED, "The spec is in force on every pod.")
