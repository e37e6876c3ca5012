"""Conditions Progressing and Updated: does the rollout move, and is the spec in force on every pod?"""

from __future__ import annotations

from dataclasses import replace

from outrider_crds.conditions import ConditionReason

from outrider_operator.cluster_model import LEADER_WORKER_SET, Object
from outrider_operator.decide.concerns.canary_outcome import canary_progressing, canary_updated
from outrider_operator.decide.concerns.download_outcome import models_progressing, models_updated
from outrider_operator.decide.concerns.rollout_view import RolloutView
from outrider_operator.decide.desired.desired_state import DesiredState
from outrider_operator.decide.desired.revisions import Revision
from outrider_operator.decide.outcome import Verdict, false, true
from outrider_operator.decide.pods.pod_states import Pods, revision_of
from outrider_operator.decide.pods.pod_troubles import scheduler_says
from outrider_operator.validation.reading import cut, dig, integer, items, name_of, text

_MOST_NAMED = 4


def progressing(rollout: RolloutView) -> Verdict:
    """True while a rollout moves; otherwise the reason why it does not.

    A pod without a node for too long is a reason, unless an autoscaler adds a node within the deadline.
    """
    desired, revision, pods = rollout.desired, rollout.desired.running, rollout.pods
    if desired.spec.paused:
        return false(ConditionReason.PAUSED, "spec.paused is true: the pods stay as they are.")
    if rollout.refused and (revision is None or desired.is_waiting or not rollout.is_complete(revision)):
        return false(
            ConditionReason.STALLED, f"{rollout.refused.message}{_old_pods_serve(pods, desired.spec_revision)}"
        )
    if rollout.terminating:
        return true(ConditionReason.ROLLING_OUT, _has_to_go(rollout.terminating[0]))
    if (verdict := models_progressing(rollout.intent.prefetch)) is not None:
        return replace(verdict, message=cut(f"{verdict.message}{_old_pods_serve(pods, desired.spec_revision)}", 2048))
    if (verdict := canary_progressing(rollout.intent.canary)) is not None:
        return verdict
    if desired.is_waiting or revision is None:
        return false(ConditionReason.WAITING_FOR_PROFILE, _waiting_for_profile(desired))
    return _moving(rollout, revision)


def _moving(rollout: RolloutView, revision: Revision) -> Verdict:
    """Verdict of Progressing for a rollout of `revision` that nothing holds."""
    pods = rollout.pods
    if missing := _missing(rollout, revision):
        return false(ConditionReason.DRAFTER_NOT_LOADED, _drafter_not_loaded(rollout, revision, missing))
    if rollout.is_complete(revision):
        return false(ConditionReason.COMPLETE, _complete(rollout, revision))
    if (stuck := rollout.stuck_pod(revision)) is not None:
        return false(ConditionReason.NO_CAPACITY, _no_capacity(rollout, stuck))
    trouble = pods.trouble(revision.name)
    if trouble is not None:
        return false(ConditionReason.STALLED, f"{trouble.message}.{_old_pods_serve(pods, revision)}")
    if rollout.is_late:
        return false(ConditionReason.STALLED, _past_deadline(rollout, revision))
    return true(ConditionReason.ROLLING_OUT, _counts(rollout, revision))


def updated(rollout: RolloutView, unreachable: str) -> Verdict:
    """True when every ready pod runs the revision of the spec and reports the current config.

    unreachable: a sentence about a pod that does not answer; empty if all do.
    """
    desired, revision, pods = rollout.desired, rollout.desired.running, rollout.pods
    if rollout.refused:
        return rollout.refused
    if rollout.terminating:
        return false(ConditionReason.ROLLING_OUT, _has_to_go(rollout.terminating[0]))
    if (verdict := _held_back(rollout)) is not None:
        return (
            false(ConditionReason.PAUSED, "spec.paused is true: the rollout waits.") if desired.spec.paused else verdict
        )
    if desired.is_waiting or revision is None:
        return false(ConditionReason.WAITING_FOR_PROFILE, _waiting_for_profile(desired))
    if missing := _missing(rollout, revision):
        return false(ConditionReason.DRAFTER_NOT_LOADED, _drafter_not_loaded(rollout, revision, missing))
    if not rollout.is_complete(revision):
        if desired.spec.paused:
            return false(ConditionReason.PAUSED, "spec.paused is true: the rollout waits.")
        return false(ConditionReason.ROLLING_OUT, _counts(rollout, revision))
    if not pods.ready and desired.spec.replicas > 0:
        return false(ConditionReason.ROLLING_OUT, f"No pod of revision {revision.name} is ready.")
    behind = _behind(rollout, revision)
    if behind:
        named = f"Not yet reporting the current config: {', '.join(behind[:_MOST_NAMED])}."
        return false(ConditionReason.CONFIG_PENDING, cut(f"{named} {unreachable}".strip(), 2048))
    return true(ConditionReason.UP_TO_DATE, f"Every ready pod runs revision {revision.name} with the current config.")


def _held_back(rollout: RolloutView) -> Verdict | None:
    """Updated, if a download or a canary keeps the spec's revision from the pods."""
    return models_updated(rollout.intent.prefetch) or canary_updated(rollout.intent.canary)


def _missing(rollout: RolloutView, revision: Revision) -> str:
    """A sentence about a drafter that a ready pod has not loaded; empty without one.

    After a proven rollout it is a fault of that pod, and advice about the rollout would not help.
    """
    if rollout.is_complete(revision) and rollout.is_proven(revision):
        return ""
    return rollout.desired.gate.missing(revision)


def _drafter_not_loaded(rollout: RolloutView, revision: Revision, missing: str) -> str:
    old = _old_pods_serve(rollout.pods, revision)
    remedy = "Correct draftPool, or set rollout.onMissingDrafter: Continue to go on without the drafter."
    return cut(f"{missing}{old} {remedy}", 2048)


def _has_to_go(document: Object) -> str:
    """A sentence about an object that is being deleted. A finalizer may delay that."""
    finalizers = [str(finalizer) for finalizer in dig(document, "metadata", "finalizers") or ()]
    by = f", which its finalizers ({', '.join(finalizers[:_MOST_NAMED])}) hold up" if finalizers else ""
    return cut(
        f"{text(document, 'kind')} {name_of(document)} is being deleted{by}; it is created again afterwards.", 2048
    )


def _complete(rollout: RolloutView, revision: Revision) -> str:
    """A sentence about a complete rollout. Without pods it does not claim that the revision works."""
    if not integer(rollout.workload, "spec", "replicas"):
        return f"replicas is 0; the next pod runs revision {revision.name}."
    doubt = "" if rollout.is_proven(revision) else "; none has reported its drafters yet"
    return f"Every pod runs revision {revision.name}{doubt}."


def _no_capacity(rollout: RolloutView, pod: Object) -> str:
    others = [other for other in rollout.pods.ready if revision_of(other) != revision_of(pod)]
    reason = scheduler_says(pod).rstrip(".") or "the scheduler finds no node"
    start = f"Pod {name_of(pod)} of revision {revision_of(pod)} has no node: {reason}."
    if others and rollout.desired.spec.rollout.max_unavailable == 0:
        return (
            f"{start} The old pods serve on. Add capacity, or set rollout.maxUnavailable: 1 so that an old pod makes "
            "room for a new one."
        )
    return f"{start} Add a node that fits spec.accelerator, or change it."


def _past_deadline(rollout: RolloutView, revision: Revision) -> str:
    why = rollout.pods.why_not_ready(revision.name).rstrip(".") or _unanswered(rollout, revision)
    deadline, old = rollout.desired.spec.rollout.progress_deadline, _old_pods_serve(rollout.pods, revision)
    return f"No progress within rollout.progressDeadline ({deadline}). {why}.{old}"


def _unanswered(rollout: RolloutView, revision: Revision) -> str:
    ready = [name_of(pod) for pod in rollout.pods.ready if revision_of(pod) == revision.name]
    return f"Pod {ready[0]} is ready and does not report its drafters" if ready else "No new pod got ready"


def _old_pods_serve(pods: Pods, revision: Revision) -> str:
    old = [pod for pod in pods.ready if revision_of(pod) != revision.name]
    return " The old pods serve on." if old else ""


def _behind(rollout: RolloutView, revision: Revision) -> list[str]:
    """Ready pods of another revision, or that do not report the current config, with the reason."""
    late = []
    for pod in rollout.pods.ready:
        state = rollout.world.states.get(name_of(pod))
        if state is None:
            late.append(f"{name_of(pod)} (no answer on its state endpoint)")
        elif revision_of(pod) != revision.name or state.config_hash != rollout.desired.hot_hash:
            late.append(f"{name_of(pod)} ({state.config_error})" if state.config_error else name_of(pod))
    return sorted(late)


def _waiting_for_profile(desired: DesiredState) -> str:
    return (
        f"Revision {desired.spec_revision.name} waits for its profile (profiling.mode is Required); see ProfilesReady. "
        "Set profiling.mode: Auto to roll out at once."
    )


def _counts(rollout: RolloutView, revision: Revision) -> str:
    pods = rollout.pods
    new = sum(revision_of(pod) == revision.name for pod in pods.ready)
    why = pods.why_not_ready(revision.name).rstrip(".") or _why_no_more(rollout, revision, new)
    start = f"{new} of {rollout.desired.replicas} pods of revision {revision.name} are ready"
    return f"{start}. {why}." if why else f"{start}."


def _why_no_more(rollout: RolloutView, revision: Revision, new: int) -> str:
    """Why no further pod of `revision` gets ready although none is in trouble; empty if nothing is known."""
    workload = rollout.workload or {}
    if workload.get("kind") == LEADER_WORKER_SET and not items(workload, "status", "conditions"):
        return f"No controller has looked at LeaderWorkerSet {name_of(workload)} yet: is LWS running?"
    if new and rollout.desired.gate.is_closed(revision):
        return "The others follow once it reports its drafters"
    return ""
