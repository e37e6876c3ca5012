"""Conditions Progressing and Updated: does the rollout move, and has the spec reached every pod?"""

from __future__ import annotations

from outrider_crds.status import Reason

from outrider_operator.decide.conditions.verdict import Verdict, false, true
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.pods import (
    living,
    ready,
    revision_of,
    scheduler_says,
    trouble,
    unschedulable_since,
    why_not_ready,
)
from outrider_operator.decide.reading import condition_of, cut, integer, name_of
from outrider_operator.decide.revisions import Revision, current_revision_name
from outrider_operator.model import Object, Observed, Settings


def progressing(observed: Observed, settings: Settings, intent: Intent) -> Verdict:
    """True while a rollout moves; otherwise why it does not."""
    if intent.spec.paused:
        return false(Reason.PAUSED, "spec.paused is true: the pods serve on as they are.")
    if intent.held or intent.running is None:
        return false(Reason.WAITING_FOR_PROFILE, _waiting_for_profile(intent))
    if is_complete(observed, intent.running):
        return false(Reason.COMPLETE, f"Every pod runs revision {intent.running.name}.")
    stuck = _unschedulable(observed, settings, intent.running)
    if stuck is not None:
        return false(Reason.NO_CAPACITY, _no_capacity(observed, intent, stuck))
    found = trouble(observed, intent.running.name)
    if found is not None:
        return false(Reason.STALLED, f"{found.message}.{_old_pods_serve(observed, intent.running)}")
    if _is_past_deadline(observed):
        return false(Reason.STALLED, _past_deadline(observed, intent, intent.running))
    return true(Reason.ROLLING_OUT, _counts(observed, intent))


def updated(observed: Observed, intent: Intent, unheard: str) -> Verdict:
    """True when every ready pod runs the revision of the spec and reports the config that is in force.

    `unheard` is a sentence about a pod that does not answer; empty where all do.
    """
    if intent.held or intent.running is None:
        return false(Reason.WAITING_FOR_PROFILE, _waiting_for_profile(intent))
    if not is_complete(observed, intent.running):
        if intent.spec.paused:
            return false(Reason.PAUSED, "spec.paused is true: the rollout waits.")
        return false(Reason.ROLLING_OUT, _counts(observed, intent))
    serving = ready(observed)
    if not serving and intent.spec.replicas > 0:
        return false(Reason.ROLLING_OUT, f"No pod of revision {intent.running.name} is ready.")
    behind = _behind(observed, intent, serving)
    if behind:
        named = f"Not yet reporting the current config: {', '.join(behind[:4])}."
        return false(Reason.CONFIG_PENDING, cut(f"{named} {unheard}".strip(), 2048))
    return true(Reason.UP_TO_DATE, f"Every ready pod runs revision {intent.running.name} with the current config.")


def is_complete(observed: Observed, revision: Revision) -> bool:
    """Has the Deployment taken in `revision`, replaced every old pod, and said so?"""
    deployment = observed.deployment
    if deployment is None or current_revision_name(observed) != revision.name:
        return False
    if integer(deployment, "status", "observedGeneration") < integer(deployment, "metadata", "generation"):
        return False
    total, new = integer(deployment, "status", "replicas"), integer(deployment, "status", "updatedReplicas")
    if integer(deployment, "spec", "replicas") == 0:
        return total == 0
    # A later loss of a pod, or a change of scale, is no rollout: the Deployment's own word stays.
    settled = condition_of(deployment, "Progressing").get("reason") == "NewReplicaSetAvailable"
    return new == total and (settled or integer(deployment, "status", "availableReplicas") >= max(1, new))


def next_capacity_check_s(observed: Observed, settings: Settings, revision: str) -> float | None:
    """Seconds until a pod of `revision` that has no node yet has waited long enough to be called NoCapacity."""
    waits = [since for pod in living(observed) if revision_of(pod) == revision and (since := unschedulable_since(pod))]
    left = [since + settings.unschedulable_s - observed.now for since in waits]
    return min((seconds for seconds in left if seconds > 0), default=None)


def _unschedulable(observed: Observed, settings: Settings, revision: Revision) -> Object | None:
    for pod in living(observed):
        since = unschedulable_since(pod)
        if since is not None and revision_of(pod) == revision.name and observed.now - since >= settings.unschedulable_s:
            return pod
    return None


def _no_capacity(observed: Observed, intent: Intent, pod: Object) -> str:
    others = [other for other in ready(observed) if revision_of(other) != revision_of(pod)]
    said = scheduler_says(pod).rstrip(".") or "the scheduler finds no node"
    start = f"Pod {name_of(pod)} of revision {revision_of(pod)} has no node: {said}."
    if others and intent.spec.rollout.max_unavailable == 0:
        return (
            f"{start} The old pods serve on. Add capacity, or set rollout.maxUnavailable: 1 so that an old pod makes "
            "room for a new one."
        )
    return f"{start} Add a node that fits spec.accelerator, or change it."


def _is_past_deadline(observed: Observed) -> bool:
    return condition_of(observed.deployment or {}, "Progressing").get("reason") == "ProgressDeadlineExceeded"


def _past_deadline(observed: Observed, intent: Intent, revision: Revision) -> str:
    why = why_not_ready(observed, revision.name).rstrip(".") or "No new pod got ready"
    deadline = intent.spec.rollout.progress_deadline
    return f"No progress within rollout.progressDeadline ({deadline}). {why}.{_old_pods_serve(observed, revision)}"


def _old_pods_serve(observed: Observed, revision: Revision) -> str:
    old = [pod for pod in ready(observed) if revision_of(pod) != revision.name]
    return " The old pods serve on." if old else ""


def _behind(observed: Observed, intent: Intent, serving: list[Object]) -> list[str]:
    """Ready pods of another revision, or whose last state does not have the current config, and why."""
    late = []
    for pod in serving:
        state = observed.states.get(name_of(pod))
        current = intent.running is not None and revision_of(pod) == intent.running.name
        if state is None:
            late.append(f"{name_of(pod)} (no answer on its state endpoint)")
        elif not current or state.config_hash != intent.hot_hash:
            late.append(f"{name_of(pod)} ({state.config_error})" if state.config_error else name_of(pod))
    return sorted(late)


def _waiting_for_profile(intent: Intent) -> str:
    return (
        f"Revision {intent.wanted.name} waits for its profile (profiling.mode is Required); see ProfilesReady. Set "
        "profiling.mode: Auto to roll out at once."
    )


def _counts(observed: Observed, intent: Intent) -> str:
    assert intent.running is not None
    new = sum(revision_of(pod) == intent.running.name for pod in ready(observed))
    why = why_not_ready(observed, intent.running.name).rstrip(".")
    start = f"{new} of {intent.spec.replicas} pods of revision {intent.running.name} are ready"
    return f"{start}. {why}." if why else f"{start}."
