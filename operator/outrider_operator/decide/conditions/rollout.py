"""Conditions Progressing and Updated: does the rollout move, and is the spec in force on every pod?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outrider_crds.base import seconds
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.status import Condition, ConditionReason

from outrider_operator.cluster_model import LEADER_WORKER_SET, Object
from outrider_operator.decide.canary.draft_canary import CanaryRollout
from outrider_operator.decide.conditions.canary import canary_progressing, canary_updated
from outrider_operator.decide.conditions.downloads import models_progressing, models_updated
from outrider_operator.decide.conditions.verdict import Verdict, false, true
from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.model_download import Prefetch
from outrider_operator.decide.pod_states import Pods, revision_of
from outrider_operator.decide.pod_troubles import scheduler_says, unschedulable_since
from outrider_operator.decide.revisions import Revision, revision_in
from outrider_operator.decide.rollout_gate import is_held
from outrider_operator.validation.reading import condition_of, cut, dig, integer, items, name_of, text, unix_seconds

_MOST_NAMED = 4


@dataclass(frozen=True)
class RolloutView:
    """Everything that the conditions of a rollout depend on."""

    desired: DesiredState
    deployment: Object | None
    pods: Pods
    refused: Verdict | None
    """Why the spec must not be applied, or why the API server refuses a child."""
    last_progressing: Condition | None
    """Condition Progressing of the last status."""
    terminating: Sequence[Object] = ()
    """Objects that must be gone before a child of the same name can be created."""
    canary: CanaryRollout | None = None
    """Draft canary, which may hold the rollout."""
    prefetch: Prefetch | None = None
    """Download of models, which the rollout may wait for."""


def progressing(rollout: RolloutView, unschedulable_s: float) -> Verdict:
    """True while a rollout moves; otherwise the reason why it does not.

    A pod that has had no node for `unschedulable_s` is a reason, unless an autoscaler adds a node within the deadline.
    """
    desired, revision, pods = rollout.desired, rollout.desired.running, rollout.pods
    if desired.spec.paused:
        return false(ConditionReason.PAUSED, "spec.paused is true: the pods stay as they are.")
    if rollout.refused and (revision is None or desired.is_waiting or not is_complete(rollout, revision)):
        return false(
            ConditionReason.STALLED, f"{rollout.refused.message}{_old_pods_serve(pods, desired.spec_revision)}"
        )
    if rollout.terminating:
        return true(ConditionReason.ROLLING_OUT, _has_to_go(rollout.terminating[0]))
    if (verdict := models_progressing(rollout.prefetch)) is not None:
        return replace(verdict, message=cut(f"{verdict.message}{_old_pods_serve(pods, desired.spec_revision)}", 2048))
    if rollout.canary is not None and (verdict := canary_progressing(rollout.canary)) is not None:
        return verdict
    if desired.is_waiting or revision is None:
        return false(ConditionReason.WAITING_FOR_PROFILE, _waiting_for_profile(desired))
    return _moving(rollout, revision, unschedulable_s)


def _moving(rollout: RolloutView, revision: Revision, unschedulable_s: float) -> Verdict:
    """Verdict of Progressing for a rollout of `revision` that nothing holds."""
    pods = rollout.pods
    if missing := _missing(rollout, revision):
        return false(ConditionReason.DRAFTER_NOT_LOADED, _drafter_not_loaded(rollout, revision, missing))
    if is_complete(rollout, revision):
        return false(ConditionReason.COMPLETE, _complete(rollout, revision))
    stuck = _unschedulable(rollout, revision, unschedulable_s)
    if stuck is not None:
        return false(ConditionReason.NO_CAPACITY, _no_capacity(rollout, stuck))
    trouble = pods.trouble(revision.name)
    if trouble is not None:
        return false(ConditionReason.STALLED, f"{trouble.message}.{_old_pods_serve(pods, revision)}")
    if _is_past_deadline(rollout):
        return false(ConditionReason.STALLED, _past_deadline(rollout, revision))
    return true(ConditionReason.ROLLING_OUT, _counts(rollout, revision))


def updated(rollout: RolloutView, states: Mapping[str, RuntimeState], unreachable: str) -> Verdict:
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
    if not is_complete(rollout, revision):
        if desired.spec.paused:
            return false(ConditionReason.PAUSED, "spec.paused is true: the rollout waits.")
        return false(ConditionReason.ROLLING_OUT, _counts(rollout, revision))
    if not pods.ready and desired.spec.replicas > 0:
        return false(ConditionReason.ROLLING_OUT, f"No pod of revision {revision.name} is ready.")
    behind = _behind(rollout, revision, states)
    if behind:
        named = f"Not yet reporting the current config: {', '.join(behind[:_MOST_NAMED])}."
        return false(ConditionReason.CONFIG_PENDING, cut(f"{named} {unreachable}".strip(), 2048))
    return true(ConditionReason.UP_TO_DATE, f"Every ready pod runs revision {revision.name} with the current config.")


def _held_back(rollout: RolloutView) -> Verdict | None:
    """Updated, if a download or a canary keeps the spec's revision from the pods."""
    verdict = models_updated(rollout.prefetch)
    return verdict or (canary_updated(rollout.canary) if rollout.canary is not None else None)


def is_complete(rollout: RolloutView, revision: Revision) -> bool:
    """Has the Deployment observed `revision`, replaced every old pod, and had every new pod available at least once?

    This counts as `kubectl rollout status` does. The Deployment's own reason NewReplicaSetAvailable is not used: it
    stays true when an old ReplicaSet is used again.
    """
    deployment = rollout.deployment
    if deployment is None or revision_in(deployment) != revision.name:
        return False
    if integer(deployment, "status", "observedGeneration") < integer(deployment, "metadata", "generation"):
        return False
    replicas, total = integer(deployment, "spec", "replicas"), integer(deployment, "status", "replicas")
    new, available = (
        integer(deployment, "status", "updatedReplicas"),
        integer(deployment, "status", "availableReplicas"),
    )
    if replicas == 0 or new < total:
        return total == 0
    # Losing a pod later, or scaling, is not a rollout.
    return _was_complete(rollout.last_progressing, revision) or available >= new >= replicas


def next_capacity_check_s(pods: Pods, unschedulable_s: float, revision: str) -> float | None:
    """Seconds until a pod of `revision` without a node has waited long enough for NoCapacity."""
    waits = [since for pod in pods.with_workers if revision_of(pod) == revision and (since := unschedulable_since(pod))]
    remaining = [since + unschedulable_s - pods.at for since in waits]
    return min((seconds for seconds in remaining if seconds > 0), default=None)


def next_deadline_check_s(rollout: RolloutView) -> float | None:
    """Seconds until a rollout exceeds its deadline, where Kubernetes does not check it."""
    if _has_deadline(rollout.deployment):
        return None
    remaining = _progressed_at(rollout) + seconds(rollout.desired.spec.rollout.progress_deadline) - rollout.pods.at
    return remaining if remaining > 0 else None


def _has_deadline(workload: Object | None) -> bool:
    """Does Kubernetes check the rollout's deadline? Not at a closed gate, and not of a LeaderWorkerSet."""
    return workload is None or not (is_held(workload) or workload["kind"] == LEADER_WORKER_SET)


def _progressed_at(rollout: RolloutView) -> float:
    """Unix time of the last progress that the workload's controller reported, or of the last group that got ready."""
    workload = rollout.deployment or {}
    times = [text(condition_of(workload, "Progressing"), "lastUpdateTime")]
    if workload.get("kind") == LEADER_WORKER_SET:
        new = [pod for pod in rollout.pods.ready if revision_of(pod) == revision_in(workload)]
        changes = (*items(workload, "status", "conditions"), *(condition_of(pod, "Ready") for pod in new))
        times += [text(change, "lastTransitionTime") for change in changes]
    return max((at for time in times if (at := unix_seconds(time)) is not None), default=rollout.pods.at)


def _missing(rollout: RolloutView, revision: Revision) -> str:
    """A sentence about a drafter that a ready pod has not loaded; empty without one.

    After a proven rollout it is a fault of that pod, and advice about the rollout would not help.
    """
    if is_complete(rollout, revision) and _is_proven(rollout, revision):
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
    if not integer(rollout.deployment, "spec", "replicas"):
        return f"replicas is 0; the next pod runs revision {revision.name}."
    return _every_pod(revision) if _is_proven(rollout, revision) else _unproven(revision)


def _every_pod(revision: Revision) -> str:
    return f"Every pod runs revision {revision.name}."


def _unproven(revision: Revision) -> str:
    return f"Every pod runs revision {revision.name}; none has reported its drafters yet."


def _was_complete(condition: Condition | None, revision: Revision) -> bool:
    return _said(condition) in (_every_pod(revision), _unproven(revision))


def _is_proven(rollout: RolloutView, revision: Revision) -> bool:
    """Has a pod of `revision` had every drafter loaded, now or when its rollout was completed?"""
    return _said(rollout.last_progressing) == _every_pod(revision) or not rollout.desired.gate.lacks_proof(revision)


def _said(condition: Condition | None) -> str:
    """Message of Progressing for a complete rollout; empty otherwise."""
    return condition.message if condition is not None and condition.reason == ConditionReason.COMPLETE else ""


def is_node_awaited(pods: Pods, deadline_s: float, revision: str) -> bool:
    """True while an autoscaler may still add a node for a pod of `revision`. Its events must be polled: no watch
    delivers them."""
    waits = [since for pod in pods.with_workers if revision_of(pod) == revision and (since := unschedulable_since(pod))]
    return any(pods.at - since < deadline_s for since in waits)


def _unschedulable(rollout: RolloutView, revision: Revision, unschedulable_s: float) -> Object | None:
    """The first pod of `revision` without a node for `unschedulable_s`, for which no node is being added."""
    pods, is_late = rollout.pods, _is_past_deadline(rollout)
    for pod in pods.with_workers:
        since = unschedulable_since(pod)
        if since is None or revision_of(pod) != revision.name or pods.at - since < unschedulable_s:
            continue
        if is_late or not pods.node_in_the_making(pod):
            return pod
    return None


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


def _is_past_deadline(rollout: RolloutView) -> bool:
    """Is the rollout past its deadline? Where Kubernetes does not check it, its last progress counts."""
    if not _has_deadline(rollout.deployment) and next_deadline_check_s(rollout) is None:
        return True
    return condition_of(rollout.deployment or {}, "Progressing").get("reason") == "ProgressDeadlineExceeded"


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


def _behind(rollout: RolloutView, revision: Revision, states: Mapping[str, RuntimeState]) -> list[str]:
    """Ready pods of another revision, or that do not report the current config, with the reason."""
    late = []
    for pod in rollout.pods.ready:
        state = states.get(name_of(pod))
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
    why = pods.why_not_ready(revision.name).rstrip(".") or (
        "The others follow once it reports its drafters" if new and rollout.desired.gate.is_closed(revision) else ""
    )
    start = f"{new} of {rollout.desired.replicas} pods of revision {revision.name} are ready"
    return f"{start}. {why}." if why else f"{start}."
