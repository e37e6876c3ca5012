"""The life of profiling Jobs: created, adopted, stopped for serving pods, deleted once their result is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider_crds.spec import ProfilingMode

from outrider_operator.decide.intent import Intent, store_of
from outrider_operator.decide.ownership import owner_reference, owner_uids
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.pods import unschedulable_since
from outrider_operator.decide.profiling.asked import asked_of, attempt_hash
from outrider_operator.decide.profiling.job_manifest import job_manifest
from outrider_operator.decide.profiling.job_outcome import is_finished, is_running
from outrider_operator.decide.profiling.measurements import Measurement, is_readable
from outrider_operator.decide.profiling.waiting import waiting_for
from outrider_operator.decide.reading import is_being_deleted, mapping, name_of, uid_of
from outrider_operator.decide.revisions import current_revision_name
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
    """The next step for each product's Job, and for those that this service asks for no more."""
    steps = [_leave(observed, intent), *(_step(observed, settings, intent, each) for each in found)]
    return JobPlan(
        create=tuple(job for step in steps for job in step.create),
        adopt=tuple(adoption for step in steps for adoption in step.adopt),
        delete=tuple(deletion for step in steps for deletion in step.delete),
        requeue_after_s=min((s.requeue_after_s for s in steps if s.requeue_after_s is not None), default=None),
    )


def _step(observed: Observed, settings: Settings, intent: Intent, each: Measurement) -> JobPlan:
    if each.job is None:
        return _begin(observed, settings, intent, each)
    if is_being_deleted(each.job):
        return JobPlan()
    if is_finished(each.job):
        return _end(observed, each, each.job)
    if _must_stop(observed, intent, each, each.job):
        return _deletion(each.job)
    if observed.uid in owner_uids(each.job):
        return JobPlan()
    owner = owner_reference(observed, controller=False)
    return JobPlan(adopt=(Adoption(JOB, name_of(each.job), uid_of(each.job), owner),))


def _begin(observed: Observed, settings: Settings, intent: Intent, each: Measurement) -> JobPlan:
    if not each.asked or _is_off(intent):
        return JobPlan()
    if each.served_first:
        return JobPlan(requeue_after_s=_SERVING_POD_S)
    required = intent.spec.profiling.mode is ProfilingMode.REQUIRED
    # The pending pod of a required measurement may bring a node up.
    if not (each.node_fits or required) or not _serving_pods_are_placed(observed, intent):
        return JobPlan()
    return JobPlan(create=(job_manifest(observed, settings, intent.spec, intent.image, each.asked),))


def _end(observed: Observed, each: Measurement, job: Object) -> JobPlan:
    """A finished Job goes only once its outcome stands in the ConfigMap: when absorbing it changes nothing."""
    if not is_readable(observed, job, each.pod):
        return JobPlan(requeue_after_s=_WORDS_S)
    if store_of(observed, each.keys.target) != each.store:
        return JobPlan(requeue_after_s=_STORE_S)
    return _deletion(job)


def _is_off(intent: Intent) -> bool:
    return intent.spec.paused or intent.spec.profiling.mode is ProfilingMode.SKIP


def _serving_pods_are_placed(observed: Observed, intent: Intent) -> bool:
    """False in the moment between a change of the Deployment and its new pods, which are to be scheduled first."""
    if intent.spec.replicas == 0 or intent.running is None:
        return True
    deployment = observed.deployment
    if deployment is None or current_revision_name(observed) != intent.running.name:
        return False
    status = mapping(deployment, "status")
    seen = status.get("observedGeneration") == mapping(deployment, "metadata").get("generation")
    created, updated = status.get("replicas", 0), status.get("updatedReplicas", 0)
    return bool(seen and created >= intent.spec.replicas and updated > 0)


def _must_stop(observed: Observed, intent: Intent, each: Measurement, job: Object) -> bool:
    """Active Jobs stop when a serving pod cannot be placed, when profiling is switched off, or when the settings of
    one that could not even start were changed. Another service's Job is only stopped for a serving pod."""
    if any(unschedulable_since(pod) is not None for pod in waiting_for(observed, each.keys.product)):
        return True
    if owner_uids(job) - {observed.uid}:
        return False
    if _is_off(intent):
        return True
    asked = asked_of(job)
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
    releases = tuple(Adoption(JOB, name_of(job), uid_of(job), release) for job in left if job not in alone)
    return replace(_deletion(*alone), adopt=releases)


def _deletion(*jobs: Object) -> JobPlan:
    """Something may now take the room: look again."""
    deletes = tuple(Delete(JOB, name_of(job), uid_of(job)) for job in jobs)
    return JobPlan(delete=deletes, requeue_after_s=_STORE_S if deletes else None)
