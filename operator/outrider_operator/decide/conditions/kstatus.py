"""Conditions Reconciling and Stalled, by the rules of kstatus: what Flux, Helm and Argo CD read of any kind.

They say nothing that the other conditions do not: True where the spec is not in force on every pod, and where it will
not be without a change by someone. At most one of them is True.
"""

from __future__ import annotations

from outrider_crds.status import ConditionStatus, ConditionType, Reason

from outrider_operator.decide.conditions.verdict import Verdict, Verdicts, false, true

_STUCK = frozenset(
    {Reason.STALLED, Reason.NO_CAPACITY, Reason.DRAFTER_NOT_LOADED}
    | {Reason.CANARY_FAILED, Reason.CANARY_ERROR, Reason.CANARY_INCONCLUSIVE}
)
"""Reasons of Progressing that no waiting mends."""
_UNMEASURABLE = frozenset(
    {Reason.PROFILE_FAILED, Reason.NOISY, Reason.NO_MATCHING_NODE, Reason.VOCABULARY_MISMATCH},
)
"""Reasons of ProfilesReady that no waiting mends; they matter to a rollout that waits for its profile."""


def with_kstatus(verdicts: Verdicts) -> Verdicts:
    """`verdicts` and the two that follow from them."""
    cause = _stalled(verdicts)
    stalled = (
        false(Reason.NOT_STALLED, "Nothing is in the way.") if cause is None else true(cause.reason, cause.message)
    )
    return {
        **verdicts,
        ConditionType.RECONCILING: false(Reason.STALLED, "See Stalled.") if cause else _reconciling(verdicts),
        ConditionType.STALLED: stalled,
    }


def _stalled(verdicts: Verdicts) -> Verdict | None:
    """What keeps the spec from every pod for good; None where nothing does."""
    spec, progress = verdicts[ConditionType.SPEC_VALID], verdicts[ConditionType.PROGRESSING]
    profiles = verdicts[ConditionType.PROFILES_READY]
    if spec.status is ConditionStatus.FALSE:
        return spec
    if progress.reason in _STUCK:
        return progress
    waits = progress.reason is Reason.WAITING_FOR_PROFILE
    return profiles if waits and profiles.reason in _UNMEASURABLE else None


def _reconciling(verdicts: Verdicts) -> Verdict:
    """The first of what is still to come; as with a Deployment, pods that are missing are."""
    for kind in (ConditionType.UPDATED, ConditionType.AVAILABLE):
        if (verdict := verdicts[kind]).status is not ConditionStatus.TRUE:
            return true(verdict.reason, verdict.message)
    return false(Reason.RECONCILED, "The spec is in force on every pod.")
