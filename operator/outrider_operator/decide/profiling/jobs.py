"""The life of profiling Jobs: created, adopted, stopped for serving pods, deleted once their result is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider_crds.spec import ProfilingMode

from outrider_operator.decide.intent import Intent
from outrider_operator.decide.ownership import owner_reference, owner_uids
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profiling.asked import asked_of, attempt_hash
from outrider_operator.decide.profiling.job_manifest import job_manifest
from outrider_operator.decide.profiling.job_outcome import is_finished, is_running
from outrider_operator.decide.profiling.measurements import Measurement, ProfilingView, is_readable
from outrider_operator.inbound.reading import is_being_deleted, name_of, text, uid_of
from outrider_operator.model import JOB, Identity, Object, Settings
from outrider_operator.plan import Adoption, Delete

_WORDS_S = 2.0
"""A pod's last words follow the end of its Job within moments."""
_STORE_S = 0.5
"""What the operator writes itself wakes nobody: look again when a result is stored, or a Job made room for another."""


@dataclass(frozen=True)
class JobPlan:
    create: tuple[Object, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    delete: tuple[Delete, ...] = ()
    requeue_after_s: float | None = None


def plan_jobs(
    view: ProfilingView, settings: Settings, intent: Intent, found: list[Measurement], *, pods_are_placed: bool
) -> JobPlan:
    """The next step for each product's Job, and for those that this service asks for no more.

    A Job gives its room to serving pods by its priority class: the scheduler alone knows which pod that would help.
    """
    steps = [_leave(view, intent), *(_step(view, settings, intent, each, pods_are_placed) for each in found)]
    return JobPlan(
        create=tuple(job for step in steps for job in step.create),
        adopt=tuple(adoption for step in steps for adoption in step.adopt),
        delete=tuple(deletion for step in steps for deletion in step.delete),
        requeue_after_s=min((s.requeue_after_s for s in steps if s.requeue_after_s is not None), default=None),
    )


def _step(view: ProfilingView, settings: Settings, intent: Intent, each: Measurement, pods_are_placed: bool) -> JobPlan:
    if each.job is None:
        return _begin(view, settings, intent, each) if pods_are_placed else JobPlan()
    if is_being_deleted(each.job):
        return JobPlan()
    if is_finished(each.job):
        return _end(view, each, each.job)
    if _must_stop(view.owner, intent, each, each.job):
        return _deletion(each.job)
    if view.owner.uid in owner_uids(each.job):
        return JobPlan()
    owner = owner_reference(view.owner, controller=False)
    return JobPlan(adopt=(Adoption(JOB, name_of(each.job), uid_of(each.job), owner),))


def _begin(view: ProfilingView, settings: Settings, intent: Intent, each: Measurement) -> JobPlan:
    if not each.asked or _is_off(intent):
        return JobPlan()
    if each.served_first:
        return JobPlan()
    required = intent.spec.profiling.mode is ProfilingMode.REQUIRED
    # The pending pod of a required measurement may bring a node up.
    if not (each.node_fits or required):
        return JobPlan()
    return JobPlan(create=(job_manifest(view.owner, settings, intent.spec, intent.image, each.asked),))


def _end(view: ProfilingView, each: Measurement, job: Object) -> JobPlan:
    """A finished Job goes only once its outcome stands in the ConfigMap: when absorbing it changes nothing."""
    if not is_readable(view.now, job, each.pod):
        return JobPlan(requeue_after_s=_WORDS_S)
    if view.store(each.keys.target) != each.store:
        return JobPlan(requeue_after_s=_STORE_S)
    return _deletion(job)


def _is_off(intent: Intent) -> bool:
    return intent.spec.paused or intent.spec.profiling.mode is ProfilingMode.SKIP


def _must_stop(owner: Identity, intent: Intent, each: Measurement, job: Object) -> bool:
    """Active Jobs stop when profiling is switched off, or when the settings of one that could not even start were
    changed. Another service's Job goes on."""
    if owner_uids(job) - {owner.uid}:
        return False
    if _is_off(intent):
        return True
    asked = asked_of(job)
    changed = asked is None or asked.attempt != attempt_hash(intent.spec, intent.image)
    return changed and not is_running(each.pod)


def _leave(view: ProfilingView, intent: Intent) -> JobPlan:
    """Jobs that this service asks for no more: the last user deletes, the others take their name off.

    Two that leave in one moment may leave a Job without any owner: whoever sees it next deletes it.
    """
    wanted = {profile_name(keys.target) for keys in intent.wanted.keys}
    others = [job for job in view.jobs if name_of(job) not in wanted and not is_being_deleted(job)]
    left = [job for job in others if view.owner.uid in owner_uids(job)]
    alone = [job for job in others if owner_uids(job) <= {view.owner.uid}]
    release = {"$patch": "delete", "uid": view.owner.uid}
    releases = tuple(Adoption(JOB, name_of(job), uid_of(job), release) for job in left if job not in alone)
    return replace(_deletion(*alone), adopt=releases)


def _deletion(*jobs: Object) -> JobPlan:
    """As they were seen: one that ended meanwhile may hold a result. Then look again, since room was made."""
    deletes = tuple(Delete(JOB, name_of(job), uid_of(job), text(job, "metadata", "resourceVersion")) for job in jobs)
    return JobPlan(delete=deletes, requeue_after_s=_STORE_S if deletes else None)
