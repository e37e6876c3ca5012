"""Profiling Jobs: create, share, release, and delete once the result is stored; and their manifest.

One Job at a time for a target on a product, with only the requested measurements.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

from outrider_crds.base import digest, seconds
from outrider_crds.runtime_config import BootConfig, boot_config
from outrider_crds.spec import ProfilingMode, SpeculativeServiceSpec

from outrider_operator.cluster_model import JOB, PROFILING, Object, OperatorSettings, ServiceIdentity
from outrider_operator.decide.desired.desired_state import DesiredState
from outrider_operator.decide.outcome import ConcernOutcome, merge
from outrider_operator.decide.ownership import owner_reference, owner_uids
from outrider_operator.decide.pod_spec.container import job_document, job_pod
from outrider_operator.decide.pod_spec.placement import scheduling
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.pods.job_pods import is_done
from outrider_operator.decide.profiling.measurement_request import (
    MeasurementRequest,
    annotations_of,
    attempt_hash,
    is_running,
    request_of,
)
from outrider_operator.decide.profiling.product_profiles import ProductProfile, ProfilingView, is_readable, with_nodes
from outrider_operator.decide.profiling.profile_maps import deletion, joins, leave
from outrider_operator.plan import Adoption, Delete
from outrider_operator.validation.reading import (
    annotation,
    created_s,
    is_being_deleted,
    name_of,
    owners_of,
    text,
    uid_of,
)
from outrider_operator.validation.reports import PROFILER

_TERMINATION_MESSAGE_WAIT_S = 2.0
"""Seconds until the next reconcile while a pod's termination message is missing: it follows the end of the Job soon."""
_STORE_S = 0.5
"""Seconds until the next reconcile after the operator's own writes, which trigger none: a result, or a deleted Job."""
_ELSEWHERE_S = 15.0
"""Seconds between checks for a Job of another namespace. If it ends without a result, it wakes no service here."""
_FOLLOW_NODES_AFTER_S = 600.0
"""Age from which a pending Job is recreated for new nodes. Earlier it would lose its place in a queue too often: in an
autoscaled cluster nodes come and go every minute."""
NODES_ANNOTATION = "outrider.dev/nodes"
_MARK_LENGTH = 6
_RESULT_FILE = "/dev/termination-log"
_SHARED_NAME = "outrider-profile"
"""Service and revision in the Job's boot config: several services share the measurement."""


def plan_jobs(view: ProfilingView, profiles: list[ProductProfile], *, pods_are_placed: bool) -> ConcernOutcome:
    """Plan the next step for the Job of each product, and for Jobs that this service no longer needs.

    A Job's low priority class lets the scheduler preempt it for serving pods.
    """
    usable = with_nodes(profiles)
    return merge([_leave(view), *(_step(view, profile, pods_are_placed, profile in usable) for profile in profiles)])


def _step(view: ProfilingView, profile: ProductProfile, pods_are_placed: bool, may_bring_node: bool) -> ConcernOutcome:
    job = profile.job
    if job is None:
        return _begin(view, profile, may_bring_node) if pods_are_placed else ConcernOutcome()
    if is_being_deleted(job):
        return ConcernOutcome()
    if is_done(job, profile.pod, PROFILER):
        return _end(view, profile, job)
    if _must_stop(view, profile, job) or _waits_elsewhere(view, profile, job):
        return _deletion(deletion(JOB, job))
    if not joins(job, view.owner):
        return ConcernOutcome()
    return ConcernOutcome(
        adopt=(Adoption(JOB, name_of(job), uid_of(job), owner_reference(view.owner, controller=False)),)
    )


def _begin(view: ProfilingView, profile: ProductProfile, may_bring_node: bool) -> ConcernOutcome:
    """Create the Job if it can run. may_bring_node: no other product has a node, so this one may wait for its node."""
    desired = view.desired
    if not profile.request or _is_off(desired) or profile.served_first:
        return ConcernOutcome()
    if profile.is_measured_elsewhere:
        return ConcernOutcome(wake_after_s=_ELSEWHERE_S)
    required = desired.spec.profiling.mode is ProfilingMode.REQUIRED
    # The pending pod of a required measurement makes an autoscaler add a node.
    if not (profile.node_fits or (required and may_bring_node)):
        return ConcernOutcome()
    settings = view.world.settings
    job = job_manifest(view.owner, settings, desired.spec, desired.image, profile.request, profile.hostnames)
    return ConcernOutcome(create=(job,))


def _end(view: ProfilingView, profile: ProductProfile, job: Object) -> ConcernOutcome:
    """Delete a finished Job once its outcome is in the ConfigMap, that is when absorbing it changes nothing."""
    if not is_readable(view.world.at, job, profile.pod):
        return ConcernOutcome(wake_after_s=_TERMINATION_MESSAGE_WAIT_S)
    if view.store(profile.keys.target) != profile.store:
        return ConcernOutcome(wake_after_s=_STORE_S)
    return _deletion(deletion(JOB, job))


def _is_off(desired: DesiredState) -> bool:
    return desired.spec.paused or not desired.spec.is_measurable


def _must_stop(view: ProfilingView, profile: ProductProfile, job: Object) -> bool:
    """Must an active Job stop? It does if profiling is off, or if its settings changed before it could start.

    A pending Job also stops if its measurements came from elsewhere, or will. A Job that another service needs
    continues.
    """
    desired = view.desired
    if owner_uids(job) - {view.owner.uid}:
        return False
    if _is_off(desired):
        return True
    request = request_of(job)
    changed = request is None or request.attempt != attempt_hash(desired.spec, desired.image)
    is_needless = not profile.request or profile.is_measured_elsewhere
    return (changed or is_needless) and not is_running(profile.pod)


def _waits_elsewhere(view: ProfilingView, profile: ProductProfile, job: Object) -> bool:
    """Does a pending Job name the wrong nodes: none of them exists any more, or others came long ago?

    Only the service that created the Job decides so; it then recreates the Job.
    """
    if not profile.hostnames or text(profile.pod or {}, "spec", "nodeName"):
        return False
    if next(iter(owners_of(job)), {}).get("uid") != view.owner.uid:
        return False
    known, present = (set(mark.split()) for mark in (annotation(job, NODES_ANNOTATION), nodes_mark(profile.hostnames)))
    return not known & present or (bool(present - known) and view.world.at - created_s(job) >= _FOLLOW_NODES_AFTER_S)


def _leave(view: ProfilingView) -> ConcernOutcome:
    """Release Jobs that this service no longer needs, and delete Jobs without any owner.

    A service that was deleted with --cascade=orphan leaves such Jobs, which hold an accelerator for nothing.
    """
    jobs = view.world.observed.jobs
    used = {profile_name(keys.target) for keys in view.desired.spec_revision.keys}
    releases, deletes = leave(JOB, jobs, used, view.owner)
    ours = [job for job in jobs if request_of(job) is not None]  # labels alone may be copied with any manifest
    orphans = [job for job in ours if not (name_of(job) in used or owner_uids(job) or is_being_deleted(job))]
    return replace(_deletion(*deletes, *(deletion(JOB, job) for job in orphans)), adopt=releases)


def _deletion(*deletes: Delete) -> ConcernOutcome:
    """Delete, then reconcile again soon, since there is room now."""
    return ConcernOutcome(delete=deletes, wake_after_s=_STORE_S if deletes else None)


def job_manifest(
    owner: ServiceIdentity,
    settings: OperatorSettings,
    spec: SpeculativeServiceSpec,
    image: str,
    request: MeasurementRequest,
    hostnames: tuple[str, ...] = (),
) -> Object:
    """The Job for `request`. Its name is the target key, so the API server itself prevents a second one.

    Its pod runs on one of `hostnames`; without any, on every node that fits.
    """
    notes = {**annotations_of(request), NODES_ANNOTATION: nodes_mark(hostnames)}
    metadata = {
        "name": profile_name(request.keys.target),
        "annotations": {**spec.pod_template.annotations, **notes},
        # No owner is the controller: each service that needs the measurement adds itself.
        "ownerReferences": [owner_reference(owner, controller=False)],
    }
    most, shared = spec.speculation.max_draft_tokens, {"service": _SHARED_NAME, "revision": _SHARED_NAME}
    config = boot_config(spec, **shared, namespace=owner.namespace, image=image, max_draft_tokens=most)
    program = {"command": ["outrider-profile"], "args": _arguments(spec, request, config)}
    fields = {**scheduling(spec, [request.keys.product], hostnames), **_limits(spec, settings)}
    pod = job_pod(spec, settings, image, PROFILER, program, fields)
    return job_document(owner, spec, PROFILING, metadata, pod)


def _limits(spec: SpeculativeServiceSpec, settings: OperatorSettings) -> Object:
    """The deadline is on the pod, not on the Job: it counts from the start of the pod, so that waiting for a free GPU
    is not a failure, and a pod that ran too long stays with its last log lines."""
    priority = settings.profiling_priority_class
    deadline = {"activeDeadlineSeconds": max(1, math.ceil(seconds(spec.profiling.timeout)))}
    return {**deadline, **({"priorityClassName": priority} if priority else {})}


def nodes_mark(hostnames: tuple[str, ...]) -> str:
    """Digests of the nodes that a Job may run on. They go into an annotation: the cache drops pod templates."""
    return " ".join(digest(hostname, _MARK_LENGTH) for hostname in hostnames)


def _arguments(spec: SpeculativeServiceSpec, request: MeasurementRequest, config: BootConfig) -> list[str]:
    arguments = ["--config-json", json.dumps(config.wire(), sort_keys=True), "--product", request.keys.product]
    arguments += ["--target"] if request.target else []
    for name in request.drafters:
        arguments += ["--drafter", name]
    return [*arguments, "--time-budget", spec.profiling.time_budget, "--result", _RESULT_FILE]
