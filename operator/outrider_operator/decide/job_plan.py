"""The life of profiling Jobs: created, adopted, stopped for serving pods, deleted once their result is stored."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.spec import ProfilingMode

from outrider_operator.decide.intent import Intent, store_of
from outrider_operator.decide.job_manifest import asked_of, attempt_hash, job_manifest
from outrider_operator.decide.job_outcome import is_finished, is_running
from outrider_operator.decide.measurements import Measurement, is_readable
from outrider_operator.decide.ownership import owner_reference, owner_uids
from outrider_operator.decide.pods import unschedulable_since
from outrider_operator.decide.reading import is_being_deleted, mapping, name_of, uid_of
from outrider_operator.decide.volumes import profile_name
from outrider_operator.decide.waiting import waiting_for
from outrider_operator.model import JOB, Adoption, Delete, Object, Observed, Settings

_WORDS_S = 2.0
"""A pod's last words follow the end of its Job within moments."""
_SERVING_POD_S = 5.0
"""The pod that goes first may be another service's: nothing of this one changes when it has its node."""
_STORE_S = 0.5
"""What the operator writes itself wakes nobody: look again when a result is stored, or a Job made room for another."""


@dataclass(frozen=True)
class JobPlan:
    create: tuple[Object, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    delete: tuple[Delete, ...] = ()
    requeue_after_s: float | None = None


def plan_jobs(observed: Observed, settings: Settings, intent: Intent, found: list[Measurement]) -> JobPlan:
    """Deletes and creations of Jobs. A finished one goes only once its outcome stands in the ConfigMap."""
    leave = _leave(observed, intent)
    deletes, adopts = [*leave.delete], [*leave.adopt]
    creates: list[Object] = []
    waits: list[float] = []
    for each in found:
        if each.job is None:
            if _may_start(observed, intent, each):
                creates.append(job_manifest(observed, settings, intent.spec, intent.image, each.asked))
            elif each.asked and each.served_first:
                waits.append(_SERVING_POD_S)
        elif is_being_deleted(each.job):
            continue
        elif is_finished(each.job):
            if _is_stored(observed, each):
                deletes.append(_deletion(each.job))
            else:
                waits.append(_STORE_S if is_readable(observed, each.job, each.pod) else _WORDS_S)
        elif _must_stop(observed, intent, each):
            deletes.append(_deletion(each.job))
        elif observed.uid not in owner_uids(each.job):
            owner = owner_reference(observed, controller=False)
            adopts.append(Adoption(JOB, name_of(each.job), uid_of(each.job), owner))
    if deletes:
        waits.append(_STORE_S)
    return JobPlan(tuple(creates), tuple(adopts), tuple(deletes), min(waits, default=None))


def _may_start(observed: Observed, intent: Intent, each: Measurement) -> bool:
    required = intent.spec.profiling.mode is ProfilingMode.REQUIRED
    return (
        bool(each.asked)
        and intent.spec.profiling.mode is not ProfilingMode.SKIP
        and not intent.spec.paused
        and (each.node_fits or required)  # the pending pod of a required measurement may bring a node up
        and not each.served_first
        and _serving_pods_are_placed(observed, intent)
    )


def _serving_pods_are_placed(observed: Observed, intent: Intent) -> bool:
    """False in the moment between a change of the Deployment and its pods, which are to be scheduled first."""
    if intent.spec.replicas == 0 or intent.running is None:
        return True
    deployment = observed.deployment
    if deployment is None:
        return False
    seen = mapping(deployment, "status").get("observedGeneration", 0)
    created = mapping(deployment, "status").get("replicas", 0)
    return bool(seen == mapping(deployment, "metadata").get("generation", 0) and created >= intent.spec.replicas)


def _must_stop(observed: Observed, intent: Intent, each: Measurement) -> bool:
    """Active Jobs stop when a serving pod cannot be placed, when profiling is switched off, or when the settings of
    one that could not even start were changed. Another service's Job is only stopped for a serving pod."""
    assert each.job is not None
    if any(unschedulable_since(pod) is not None for pod in waiting_for(observed, each.keys.product)):
        return True
    if owner_uids(each.job) - {observed.uid}:
        return False
    if intent.spec.paused or intent.spec.profiling.mode is ProfilingMode.SKIP:
        return True
    asked = asked_of(each.job)
    changed = asked is None or asked.attempt != attempt_hash(intent.spec, intent.image)
    return changed and not is_running(each.pod)


def _leave(observed: Observed, intent: Intent) -> JobPlan:
    """Jobs that this service asks for no more: the last user deletes, the others take their name off.

    Two that leave in one moment may leave a Job without any owner: whoever sees it next deletes it.
    """
    wanted = {profile_name(keys.target) for keys in intent.wanted.keys}
    others = [job for job in observed.jobs if name_of(job) not in wanted and not is_being_deleted(job)]
    left = [job for job in others if observed.uid in owner_uids(job)]
    alone = [job for job in others if owner_uids(job) <= {observed.uid}]
    release = {"$patch": "delete", "uid": observed.uid}
    return JobPlan(
        adopt=tuple(Adoption(JOB, name_of(job), uid_of(job), release) for job in left if job not in alone),
        delete=tuple(_deletion(job) for job in alone),
    )


def _is_stored(observed: Observed, each: Measurement) -> bool:
    """True when absorbing the outcome of the finished Job changes nothing."""
    assert each.job is not None
    readable = is_readable(observed, each.job, each.pod)
    return readable and store_of(observed, each.keys.target) == each.store


def _deletion(job: Object) -> Delete:
    return Delete(JOB, name_of(job), uid_of(job))
