"""The life of profiling Jobs: created, adopted, left, deleted once their result is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider_crds.spec import ProfilingMode

from outrider_operator.decide.intent import Intent
from outrider_operator.decide.ownership import owner_reference, owner_uids
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profiling.asked import asked_of, attempt_hash
from outrider_operator.decide.profiling.job_manifest import NODES_ANNOTATION, job_manifest, nodes_mark
from outrider_operator.decide.profiling.job_outcome import is_finished, is_running
from outrider_operator.decide.profiling.product_profiles import ProductProfile, ProfilingView, is_readable, with_nodes
from outrider_operator.decide.profiling.sharing import deletion, joins, leave
from outrider_operator.inbound.reading import (
    annotation,
    is_being_deleted,
    name_of,
    owners_of,
    text,
    uid_of,
    unix_seconds,
)
from outrider_operator.model import JOB, Identity, Object, Settings
from outrider_operator.plan import Adoption, Delete

_WORDS_S = 2.0
"""A pod's last words follow the end of its Job within moments."""
_STORE_S = 0.5
"""What the operator writes itself wakes nobody: look again when a result is stored, or a Job made room for another."""
_ELSEWHERE_S = 15.0
"""Another namespace's Job that ends without a result wakes no service of this one."""
_FOLLOW_NODES_AFTER_S = 600.0
"""Made again, a Job loses its place in a queue of Jobs, and in an autoscaled cluster nodes come and go every minute."""


@dataclass(frozen=True)
class JobPlan:
    create: tuple[Object, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    delete: tuple[Delete, ...] = ()
    requeue_after_s: float | None = None


def plan_jobs(
    view: ProfilingView, settings: Settings, intent: Intent, found: list[ProductProfile], *, pods_are_placed: bool
) -> JobPlan:
    """The next step for each product's Job, and for those that this service asks for no more.

    A Job gives its room to serving pods by its priority class: the scheduler alone knows which pod that would help.
    """
    usable = with_nodes(found)
    steps = [
        _leave(view, intent),
        *(
            _step(view, settings, intent, profile, pods_are_placed, may_bring_node=profile in usable)
            for profile in found
        ),
    ]
    return JobPlan(
        create=tuple(job for step in steps for job in step.create),
        adopt=tuple(adoption for step in steps for adoption in step.adopt),
        delete=tuple(deletion for step in steps for deletion in step.delete),
        requeue_after_s=min((s.requeue_after_s for s in steps if s.requeue_after_s is not None), default=None),
    )


def _step(
    view: ProfilingView,
    settings: Settings,
    intent: Intent,
    each: ProductProfile,
    pods_are_placed: bool,
    *,
    may_bring_node: bool,
) -> JobPlan:
    if each.job is None:
        return _begin(view, settings, intent, each, may_bring_node) if pods_are_placed else JobPlan()
    if is_being_deleted(each.job):
        return JobPlan()
    if is_finished(each.job):
        return _end(view, each, each.job)
    if _must_stop(view.owner, intent, each, each.job) or _waits_elsewhere(view, each, each.job):
        return _deletion(deletion(JOB, each.job))
    if not joins(each.job, view.owner):
        return JobPlan()
    owner = owner_reference(view.owner, controller=False)
    return JobPlan(adopt=(Adoption(JOB, name_of(each.job), uid_of(each.job), owner),))


def _begin(
    view: ProfilingView, settings: Settings, intent: Intent, each: ProductProfile, may_bring_node: bool
) -> JobPlan:
    """`may_bring_node`: no other product has a node, so that a required measurement may wait for this one's."""
    if not each.asked or _is_off(intent):
        return JobPlan()
    if each.served_first:
        return JobPlan()
    if each.is_measured_elsewhere:
        return JobPlan(requeue_after_s=_ELSEWHERE_S)
    required = intent.spec.profiling.mode is ProfilingMode.REQUIRED
    # The pending pod of a required measurement may bring a node up.
    if not (each.node_fits or (required and may_bring_node)):
        return JobPlan()
    return JobPlan(create=(job_manifest(view.owner, settings, intent.spec, intent.image, each.asked, each.hostnames),))


def _end(view: ProfilingView, each: ProductProfile, job: Object) -> JobPlan:
    """A finished Job goes only once its outcome stands in the ConfigMap: when absorbing it changes nothing."""
    if not is_readable(view.now, job, each.pod):
        return JobPlan(requeue_after_s=_WORDS_S)
    if view.store(each.keys.target) != each.store:
        return JobPlan(requeue_after_s=_STORE_S)
    return _deletion(deletion(JOB, job))


def _is_off(intent: Intent) -> bool:
    return intent.spec.paused or intent.spec.profiling.mode is ProfilingMode.SKIP


def _must_stop(owner: Identity, intent: Intent, each: ProductProfile, job: Object) -> bool:
    """Active Jobs stop when profiling is switched off. One that could not even start does when its settings were
    changed, or what it would measure came from elsewhere. Another service's Job goes on."""
    if owner_uids(job) - {owner.uid}:
        return False
    if _is_off(intent):
        return True
    asked = asked_of(job)
    changed = asked is None or asked.attempt != attempt_hash(intent.spec, intent.image)
    return (changed or not each.asked) and not is_running(each.pod)


def _waits_elsewhere(view: ProfilingView, profile: ProductProfile, job: Object) -> bool:
    """True of a Job that waits for nodes of which none is left, or has waited for long while others came; the service
    that made it makes it again."""
    if not profile.hostnames or text(profile.pod or {}, "spec", "nodeName"):
        return False
    if next(iter(owners_of(job)), {}).get("uid") != view.owner.uid:
        return False
    known, present = (set(mark.split()) for mark in (annotation(job, NODES_ANNOTATION), nodes_mark(profile.hostnames)))
    created_at = unix_seconds(text(job, "metadata", "creationTimestamp")) or 0.0
    return not known & present or (bool(present - known) and view.now - created_at >= _FOLLOW_NODES_AFTER_S)


def _leave(view: ProfilingView, intent: Intent) -> JobPlan:
    """Jobs that this service asks for no more. Whoever sees one of ours without any owner (deleted with
    --cascade=orphan) deletes it: it holds an accelerator for nobody."""
    wanted = {profile_name(keys.target) for keys in intent.wanted.keys}
    releases, deletes = leave(JOB, view.jobs, wanted, view.owner)
    ours = [job for job in view.jobs if asked_of(job) is not None]  # two labels are copied with any manifest
    orphans = [job for job in ours if not (name_of(job) in wanted or owner_uids(job) or is_being_deleted(job))]
    return replace(_deletion(*deletes, *(deletion(JOB, job) for job in orphans)), adopt=releases)


def _deletion(*deletes: Delete) -> JobPlan:
    """Then look again, since room was made."""
    return JobPlan(delete=deletes, requeue_after_s=_STORE_S if deletes else None)
