"""One download of a service's hub models into its claim, before pods and profiling Jobs need them.

Without it eight pods and a Job download a target of 140 GB each, and hinder one another. A revision that names models
waits for their download; the one that runs serves on.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum

from outrider_crds.base import digest
from outrider_crds.model_sources import RETRY_REFUSED_AFTER_S, ModelRef
from outrider_crds.prefetch_report import PREFETCH_REFUSED, PrefetchProgress
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import (
    JOB,
    PREFETCH,
    ApiRefusal,
    Object,
    OperatorSettings,
    ServiceIdentity,
)
from outrider_operator.decide.desired.desired_state import DesiredState
from outrider_operator.decide.desired.revisions import canary_revision_name, current_revision_name, revision_in
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.outcome import ConcernOutcome
from outrider_operator.decide.ownership import owner_reference
from outrider_operator.decide.pod_spec.container import job_document, job_pod
from outrider_operator.decide.pod_spec.placement import resources_without_devices, scheduling
from outrider_operator.decide.pods.job_pods import has_succeeded, is_done, is_held, pods_of_job, why_failed
from outrider_operator.decide.pods.pod_states import LOOK_AGAIN_S, why_not_running
from outrider_operator.decide.pods.pod_troubles import has_ended, how_it_ended
from outrider_operator.decide.profiling.measurement_request import attempt_hash
from outrider_operator.plan import Delete
from outrider_operator.validation import reading

KEY_ANNOTATION = "outrider.dev/prefetch"
"""Annotation of the Job: what it downloads, and the settings that it was tried with."""
DOWNLOADER = "prefetch"
"""Name of the Job's container."""
_RETRIES = 3
_LAST_LINES = 3
_NO_PROGRAM_CODES = (126, 127)
"""Exit codes of a shell or container runtime whose command is not in its image."""
_PROGRAM = "outrider-prefetch"
_EXIT_CODE = re.compile(r"failed with exit code (\d{1,3})\b")
"""The Job controller's words about a container that matched a rule of the Job's podFailurePolicy."""


class DownloadPhase(StrEnum):
    """State of a download, as status.prefetch reports it."""

    WAITING = "Waiting"
    DOWNLOADING = "Downloading"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class Prefetch:
    """A service's download at one look."""

    claim: str
    models: tuple[str, ...]
    """Names of the models that are downloaded."""
    key: str
    """Digest of claim and models."""
    attempt: str
    """Digest of the settings that decide whether a download can succeed."""
    is_due: bool
    """Must the wanted revision wait until the models are there?"""
    job: Object | None = None
    """The Job that downloads these models."""
    phase: DownloadPhase = DownloadPhase.WAITING
    why: str = ""
    """What keeps a download waiting, or why it failed; empty otherwise."""
    is_obsolete: bool = False
    """Must the Job go: to be tried again, with other settings at once, or since a sidecar alone keeps its pod?"""
    is_program_missing: bool = False
    """Is the runtime image one of a release that cannot prefetch?"""
    progress: PrefetchProgress | None = None
    refused: ApiRefusal | None = None
    """What the API server has against the Job."""

    @property
    def holds(self) -> bool:
        """Does the wanted revision wait for a download? Where the image has no such program, pods download."""
        return self.is_due and self.phase is not DownloadPhase.COMPLETE and not self.is_program_missing


def prefetch_of(world: ServiceWorld, desired: DesiredState) -> Prefetch | None:
    """None for a service that downloads nothing into a claim."""
    spec, observed, claim = desired.spec, world.observed, desired.spec.model_cache.pvc
    models = hub_models(spec)
    if claim is None or not models:
        return None
    prefetch = Prefetch(
        claim=claim.claim_name,
        models=tuple(model.name for model in models),
        key=digest([claim.claim_name, [[model.name, model.revision] for model in models]]),
        attempt=attempt_hash(spec, desired.image),
        is_due=_is_due(world, desired),
        progress=observed.prefetch_progress,
        refused=next((refusal for refusal in observed.refusals if refusal.component == PREFETCH), None),
    )
    job = _own_job(world)
    key, _, attempt = reading.annotation(job or {}, KEY_ANNOTATION).partition("/")
    return _seen(world, prefetch, job, attempt == prefetch.attempt) if job and key == prefetch.key else prefetch


def _seen(world: ServiceWorld, prefetch: Prefetch, job: Object, is_of_these_settings: bool) -> Prefetch:
    """`prefetch` with what its Job has done. A Job of other settings is made again if it failed, or has not begun. One
    that failed is also made again after an hour."""
    pods = pods_of_job(job, world.observed.prefetch_pods)
    if has_succeeded(job, pods, DOWNLOADER):
        # What a sidecar keeps from being complete tells what is there only until the models have pods.
        is_kept = not reading.is_true(job, "Complete") and any(is_held(pod, DOWNLOADER) for pod in pods)
        return replace(prefetch, job=job, phase=DownloadPhase.COMPLETE, is_obsolete=is_kept and not prefetch.is_due)
    pod = next(iter(pods), None)
    has_begun, has_ended = (
        reading.text(pod, "status", "phase") in ("Running", "Succeeded"),
        is_done(job, pod, DOWNLOADER),
    )
    if has_ended and is_of_these_settings:
        phase, why = DownloadPhase.FAILED, _why_failed(prefetch, job, pod)
    else:
        phase = DownloadPhase.DOWNLOADING if has_begun else DownloadPhase.WAITING
        why = "" if has_begun else why_not_running(job, pod, world.observed.warnings, world.at)
    is_program_missing = _is_program_missing(job, pod)
    is_repeatable = has_ended and prefetch.is_due and not is_program_missing
    is_retry_due = is_repeatable and world.at >= _ended_s(job, pod) + RETRY_REFUSED_AFTER_S
    return replace(
        prefetch,
        job=job,
        phase=phase,
        why=why,
        is_obsolete=is_retry_due or (not is_of_these_settings and (has_ended or not has_begun)),
        is_program_missing=is_program_missing,
    )


def hub_models(spec: SpeculativeServiceSpec) -> list[ModelRef]:
    """The target first, each once."""
    models = [model for model in spec.models.values() if model.source.hub is not None]
    return list({(model.name, model.revision): model for model in models}.values())


def plan_prefetch(world: ServiceWorld, desired: DesiredState, prefetch: Prefetch | None) -> ConcernOutcome:
    """The Job, made again if it is another one's, or failed or waits with other settings.

    A complete one stays as the record of what is on the claim: a change of anything else needs no download."""
    job = _own_job(world)
    if job is not None and reading.is_being_deleted(job):
        return ConcernOutcome(wake_after_s=2.0)
    if prefetch is not None and prefetch.holds and desired.spec.paused:
        return ConcernOutcome()  # a Job that may not be made again keeps the reason why it failed
    if job is not None and (prefetch is None or prefetch.job is None or prefetch.is_obsolete):
        delete = Delete(JOB, reading.name_of(job), reading.uid_of(job), component=PREFETCH)
        return ConcernOutcome(delete=(delete,), wake_after_s=2.0)
    if prefetch is None or not prefetch.holds:
        return ConcernOutcome()
    owner, settings = world.children.owner, world.settings
    create = (_job(owner, settings, desired, prefetch),) if job is None else ()
    return ConcernOutcome(create=create, wake_after_s=LOOK_AGAIN_S)


def _is_due(world: ServiceWorld, desired: DesiredState) -> bool:
    """Not for a revision that has pods: they have its models, or download them already."""
    revision = desired.spec_revision.name
    hosted = (current_revision_name(world.children), revision_in(world.children.canary))
    return not {revision, canary_revision_name(revision)} & set(hosted)


def _own_job(world: ServiceWorld) -> Object | None:
    jobs, uid = world.observed.prefetch_jobs, world.children.owner.uid
    return next((job for job in jobs if reading.controller_uid(job) == uid), None)


def _ended_s(job: Object, pod: Object | None) -> float:
    """Unix time of a failed download's end; infinite if neither Job nor pod says it."""
    times = (
        reading.text(reading.condition_of(job, "Failed"), "lastTransitionTime"),
        reading.text(reading.ended(pod, DOWNLOADER), "finishedAt"),
    )
    return next((moment_s for moment_s in map(reading.unix_seconds, times) if moment_s is not None), math.inf)


def _is_program_missing(job: Object, pod: Object | None) -> bool:
    """Is there no downloader in the image? The Job may tell the exit code of a pod that is gone."""
    end, failed = reading.ended(pod, DOWNLOADER), reading.condition_of(job, "Failed")
    is_by_policy = failed.get("status") == "True" and reading.text(failed, "reason") == "PodFailurePolicy"
    said = _EXIT_CODE.search(reading.text(failed, "message")) if is_by_policy else None
    codes = {reading.integer(end, "exitCode"), int(said[1]) if said else 0}
    # Any container that cannot be made ends with code 128; for want of its program, runc and crun name it.
    is_named = reading.text(end, "reason") == "StartError" and _PROGRAM in reading.text(end, "message")
    return is_named or not codes.isdisjoint(_NO_PROGRAM_CODES)


def _why_failed(prefetch: Prefetch, job: Object, pod: Object | None) -> str:
    """The downloader's last words, how its pod ended where it never ran, or the Job controller's words."""
    said = reading.last_lines(reading.text(reading.ended(pod, DOWNLOADER), "message"), _LAST_LINES)
    said = said or (how_it_ended(pod) if pod is not None and has_ended(pod) else why_failed(job)) or "no reason given"
    start = f"Downloading {', '.join(prefetch.models)} into claim {prefetch.claim} failed: {said.rstrip('.')}"
    return reading.cut(
        f"{start}. It is tried again after an hour; correct the spec or delete Job {reading.name_of(job)} to try now.",
        2048,
    )


def _job(owner: ServiceIdentity, settings: OperatorSettings, desired: DesiredState, prefetch: Prefetch) -> Object:
    spec = desired.spec
    metadata = {
        "name": f"{owner.name}-prefetch",
        "annotations": {KEY_ANNOTATION: f"{prefetch.key}/{prefetch.attempt}"},
        "ownerReferences": [owner_reference(owner, controller=True)],
    }
    codes = {"containerName": DOWNLOADER, "operator": "In", "values": sorted((PREFETCH_REFUSED, *_NO_PROGRAM_CODES))}
    final = {"action": "FailJob", "onExitCodes": codes}
    pod = _pod(settings, spec, desired.image)
    return job_document(owner, spec, PREFETCH, metadata, pod, retries=_RETRIES, failures=(final,))


def _pod(settings: OperatorSettings, spec: SpeculativeServiceSpec, image: str) -> Object:
    """A pod that needs the claim and no GPU, on a node where serving pods may run: some claims bind a volume in the
    zone of their first pod."""
    program = {"command": [_PROGRAM], "args": _arguments(spec), "resources": resources_without_devices(spec)}
    pod = job_pod(spec, settings, image, DOWNLOADER, program, _placement(spec))
    return {name: value for name, value in pod.items() if name != "resourceClaims"}


def _placement(spec: SpeculativeServiceSpec) -> Object:
    """Admission gives pods that request a GPU the toleration of its nodes' taint (ExtendedResourceToleration). This
    one requests none, so it brings the toleration along: the node selector may name such nodes."""
    accelerator = spec.accelerator
    fields = scheduling(spec, products=[])
    if accelerator.on_cpu:
        return fields
    device = {"key": accelerator.resource_name, "operator": "Exists", "effect": "NoSchedule"}
    return {**fields, "tolerations": [*reading.items(fields, "tolerations"), device]}


def _arguments(spec: SpeculativeServiceSpec) -> list[str]:
    """A target that is not there fails the Job; a draft is then left out by the pods, which say so."""
    target, *_ = spec.models.values()
    return [
        word
        for model in hub_models(spec)
        for word in ("--target" if model == target else "--draft", f"{model.name}@{model.revision or ''}")
    ]
