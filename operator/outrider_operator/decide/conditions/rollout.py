"""Conditions Progressing and Updated: does the rollout move, and has the spec reached every pod?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider_crds.base import seconds
from outrider_crds.state import RuntimeState
from outrider_crds.status import Condition, Reason

from outrider_operator.decide.canary.draft_canary import CanaryRollout
from outrider_operator.decide.conditions.canary import canary_progressing, canary_updated
from outrider_operator.decide.conditions.verdict import Verdict, false, true
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.pods import Pods, revision_of, scheduler_says, unschedulable_since
from outrider_operator.decide.revisions import Revision, revision_in
from outrider_operator.decide.rollout_gate import is_held
from outrider_operator.inbound.reading import condition_of, cut, dig, integer, name_of, text, unix_seconds
from outrider_operator.model import Object

_MOST_NAMED = 4


@dataclass(frozen=True)
class Rollout:
    """What of a rollout can be seen."""

    asked: Intent
    deployment: Object | None
    pods: Pods
    refused: Verdict | None
    """Why the spec must not be applied, or what the API server has against a child of it."""
    standing: Condition | None
    """Progressing as it stands."""
    leaving: Sequence[Object] = ()
    """What has to go before a child of its name can be made."""
    canary: CanaryRollout | None = None
    """The draft canary, which may hold the rollout."""


def progressing(rollout: Rollout, unschedulable_s: float) -> Verdict:
    """True while a rollout moves; otherwise why it does not. A pod without a node for `unschedulable_s` is why, unless
    one is being made for it within the deadline."""
    asked, revision, pods = rollout.asked, rollout.asked.running, rollout.pods
    if asked.spec.paused:
        return false(Reason.PAUSED, "spec.paused is true: the pods serve on as they are.")
    if rollout.refused and (revision is None or asked.held or not is_complete(rollout, revision)):
        return false(Reason.STALLED, f"{rollout.refused.message}{_old_pods_serve(pods, asked.wanted)}")
    if rollout.leaving:
        return true(Reason.ROLLING_OUT, _has_to_go(rollout.leaving[0]))
    if rollout.canary is not None and (verdict := canary_progressing(rollout.canary)) is not None:
        return verdict
    if asked.held or revision is None:
        return false(Reason.WAITING_FOR_PROFILE, _waiting_for_profile(asked))
    return _moving(rollout, revision, unschedulable_s)


def _moving(rollout: Rollout, revision: Revision, unschedulable_s: float) -> Verdict:
    """Progressing while nothing holds the rollout of `revision`."""
    pods = rollout.pods
    if missing := _missing(rollout, revision):
        return false(Reason.DRAFTER_NOT_LOADED, _drafter_not_loaded(rollout, revision, missing))
    if is_complete(rollout, revision):
        return false(Reason.COMPLETE, _complete(rollout, revision))
    stuck = _unschedulable(rollout, revision, unschedulable_s)
    if stuck is not None:
        return false(Reason.NO_CAPACITY, _no_capacity(rollout, stuck))
    found = pods.trouble(revision.name)
    if found is not None:
        return false(Reason.STALLED, f"{found.message}.{_old_pods_serve(pods, revision)}")
    if _is_past_deadline(rollout):
        return false(Reason.STALLED, _past_deadline(rollout, revision))
    return true(Reason.ROLLING_OUT, _counts(rollout, revision))


def updated(rollout: Rollout, states: Mapping[str, RuntimeState], unheard: str) -> Verdict:
    """True when every ready pod runs the revision of the spec and reports the config that is in force.

    `unheard` is a sentence about a pod that does not answer; empty where all do.
    """
    asked, revision, pods = rollout.asked, rollout.asked.running, rollout.pods
    if rollout.refused:
        return rollout.refused
    if rollout.leaving:
        return false(Reason.ROLLING_OUT, _has_to_go(rollout.leaving[0]))
    if rollout.canary is not None and (verdict := canary_updated(rollout.canary)) is not None:
        return false(Reason.PAUSED, "spec.paused is true: the rollout waits.") if asked.spec.paused else verdict
    if asked.held or revision is None:
        return false(Reason.WAITING_FOR_PROFILE, _waiting_for_profile(asked))
    if missing := _missing(rollout, revision):
        return false(Reason.DRAFTER_NOT_LOADED, _drafter_not_loaded(rollout, revision, missing))
    if not is_complete(rollout, revision):
        if asked.spec.paused:
            return false(Reason.PAUSED, "spec.paused is true: the rollout waits.")
        return false(Reason.ROLLING_OUT, _counts(rollout, revision))
    if not pods.ready and asked.spec.replicas > 0:
        return false(Reason.ROLLING_OUT, f"No pod of revision {revision.name} is ready.")
    behind = _behind(rollout, revision, states)
    if behind:
        named = f"Not yet reporting the current config: {', '.join(behind[:_MOST_NAMED])}."
        return false(Reason.CONFIG_PENDING, cut(f"{named} {unheard}".strip(), 2048))
    return true(Reason.UP_TO_DATE, f"Every ready pod runs revision {revision.name} with the current config.")


def is_complete(rollout: Rollout, revision: Revision) -> bool:
    """Has the Deployment taken in `revision`, replaced every old pod, and had every new one available, at least once?

    As `kubectl rollout status` counts. The Deployment's own word (NewReplicaSetAvailable) is not asked: it stays when
    a ReplicaSet of before is taken again.
    """
    deployment = rollout.deployment
    if deployment is None or revision_in(deployment) != revision.name:
        return False
    if integer(deployment, "status", "observedGeneration") < integer(deployment, "metadata", "generation"):
        return False
    asked, total = integer(deployment, "spec", "replicas"), integer(deployment, "status", "replicas")
    new, available = (
        integer(deployment, "status", "updatedReplicas"),
        integer(deployment, "status", "availableReplicas"),
    )
    if asked == 0 or new < total:
        return total == 0
    # A later loss of a pod, or a change of scale, is no rollout.
    return _was_complete(rollout.standing, revision) or available >= new >= asked


def next_capacity_check_s(pods: Pods, unschedulable_s: float, revision: str) -> float | None:
    """Seconds until a pod of `revision` that has no node yet has waited long enough to be called NoCapacity."""
    waits = [since for pod in pods.living if revision_of(pod) == revision and (since := unschedulable_since(pod))]
    left = [since + unschedulable_s - pods.now for since in waits]
    return min((seconds for seconds in left if seconds > 0), default=None)


def next_deadline_check_s(rollout: Rollout) -> float | None:
    """Seconds until a rollout that waits at its first new pod is past its deadline, which Kubernetes does not watch."""
    if not is_held(rollout.deployment):
        return None
    left = _held_since(rollout) + seconds(rollout.asked.spec.rollout.progress_deadline) - rollout.pods.now
    return left if left > 0 else None


def _held_since(rollout: Rollout) -> float:
    """Unix time of the last progress that the Deployment's controller saw."""
    since = unix_seconds(text(condition_of(rollout.deployment or {}, "Progressing"), "lastUpdateTime"))
    return since if since is not None else rollout.pods.now


def _missing(rollout: Rollout, revision: Revision) -> str:
    """What a ready pod says of a drafter that it has not loaded; after a proven rollout that is the pod's own trouble,
    and no advice on the rollout mends it."""
    if is_complete(rollout, revision) and _is_proven(rollout, revision):
        return ""
    return rollout.asked.gate.missing(revision)


def _drafter_not_loaded(rollout: Rollout, revision: Revision, missing: str) -> str:
    old = _old_pods_serve(rollout.pods, revision)
    remedy = "Correct draftPool, or set rollout.onMissingDrafter: Continue to go on without the drafter."
    return cut(f"{missing}{old} {remedy}", 2048)


def _has_to_go(document: Object) -> str:
    """Garbage collection takes it within moments, unless somebody's finalizer holds it."""
    held = [str(each) for each in dig(document, "metadata", "finalizers") or ()]
    by = f", which its finalizers ({', '.join(held[:_MOST_NAMED])}) hold up" if held else ""
    return cut(
        f"{text(document, 'kind')} {name_of(document)} is being deleted{by}; it is created again afterwards.", 2048
    )


def _complete(rollout: Rollout, revision: Revision) -> str:
    """Of no pods it says no more than that: whether the first one gets ready is still to be seen."""
    if not integer(rollout.deployment, "spec", "replicas"):
        return f"replicas is 0; the next pod runs revision {revision.name}."
    return _every_pod(revision) if _is_proven(rollout, revision) else _unproven(revision)


def _every_pod(revision: Revision) -> str:
    return f"Every pod runs revision {revision.name}."


def _unproven(revision: Revision) -> str:
    return f"Every pod runs revision {revision.name}; none has reported its drafters yet."


def _was_complete(standing: Condition | None, revision: Revision) -> bool:
    return _said(standing) in (_every_pod(revision), _unproven(revision))


def _is_proven(rollout: Rollout, revision: Revision) -> bool:
    """Has a pod of `revision` had every drafter loaded, now or when its rollout was complete?"""
    return _said(rollout.standing) == _every_pod(revision) or not rollout.asked.gate.lacks_proof(revision)


def _said(standing: Condition | None) -> str:
    """What Progressing says of a rollout that is complete; else empty."""
    return standing.message if standing is not None and standing.reason == Reason.COMPLETE else ""


def is_node_awaited(pods: Pods, deadline_s: float, revision: str) -> bool:
    """True while an autoscaler may still say that it makes a node for a pod of `revision`: no watch brings its word."""
    waits = [since for pod in pods.living if revision_of(pod) == revision and (since := unschedulable_since(pod))]
    return any(pods.now - since < deadline_s for since in waits)


def _unschedulable(rollout: Rollout, revision: Revision, unschedulable_s: float) -> Object | None:
    """The first pod of `revision` that has had no node for so long, and that no node is being made for."""
    pods, is_late = rollout.pods, _is_past_deadline(rollout)
    for pod in pods.living:
        since = unschedulable_since(pod)
        if since is None or revision_of(pod) != revision.name or pods.now - since < unschedulable_s:
            continue
        if is_late or not pods.node_in_the_making(pod):
            return pod
    return None


def _no_capacity(rollout: Rollout, pod: Object) -> str:
    others = [other for other in rollout.pods.ready if revision_of(other) != revision_of(pod)]
    said = scheduler_says(pod).rstrip(".") or "the scheduler finds no node"
    start = f"Pod {name_of(pod)} of revision {revision_of(pod)} has no node: {said}."
    if others and rollout.asked.spec.rollout.max_unavailable == 0:
        return (
            f"{start} The old pods serve on. Add capacity, or set rollout.maxUnavailable: 1 so that an old pod makes "
            "room for a new one."
        )
    return f"{start} Add a node that fits spec.accelerator, or change it."


def _is_past_deadline(rollout: Rollout) -> bool:
    """The Deployment says so; while it holds its rollout it has no deadline, and its last progress counts."""
    if is_held(rollout.deployment) and next_deadline_check_s(rollout) is None:
        return True
    return condition_of(rollout.deployment or {}, "Progressing").get("reason") == "ProgressDeadlineExceeded"


def _past_deadline(rollout: Rollout, revision: Revision) -> str:
    why = rollout.pods.why_not_ready(revision.name).rstrip(".") or _unanswered(rollout, revision)
    deadline, old = rollout.asked.spec.rollout.progress_deadline, _old_pods_serve(rollout.pods, revision)
    return f"No progress within rollout.progressDeadline ({deadline}). {why}.{old}"


def _unanswered(rollout: Rollout, revision: Revision) -> str:
    ready = [name_of(pod) for pod in rollout.pods.ready if revision_of(pod) == revision.name]
    return f"Pod {ready[0]} is ready and does not report its drafters" if ready else "No new pod got ready"


def _old_pods_serve(pods: Pods, revision: Revision) -> str:
    old = [pod for pod in pods.ready if revision_of(pod) != revision.name]
    return " The old pods serve on." if old else ""


def _behind(rollout: Rollout, revision: Revision, states: Mapping[str, RuntimeState]) -> list[str]:
    """Ready pods of another revision, or whose last state does not have the current config, and why."""
    late = []
    for pod in rollout.pods.ready:
        state = states.get(name_of(pod))
        if state is None:
            late.append(f"{name_of(pod)} (no answer on its state endpoint)")
        elif revision_of(pod) != revision.name or state.config_hash != rollout.asked.hot_hash:
            late.append(f"{name_of(pod)} ({state.config_error})" if state.config_error else name_of(pod))
    return sorted(late)


def _waiting_for_profile(asked: Intent) -> str:
    return (
        f"Revision {asked.wanted.name} waits for its profile (profiling.mode is Required); see ProfilesReady. Set "
        "profiling.mode: Auto to roll out at once."
    )


def _counts(rollout: Rollout, revision: Revision) -> str:
    pods = rollout.pods
    new = sum(revision_of(pod) == revision.name for pod in pods.ready)
    why = pods.why_not_ready(revision.name).rstrip(".") or (
        "The others follow once it reports its drafters" if new and rollout.asked.gate.is_closed(revision) else ""
    )
    start = f"{new} of {rollout.asked.replicas} pods of revision {revision.name} are ready"
    return f"{start}. {why}." if why else f"{start}."
