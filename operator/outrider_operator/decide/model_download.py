"""One download of a service's hub models into its claim, before pods and profiling Jobs need them.

Without it eight pods and a Job download a target of 140 GB each, and hinder one another. A revision that names models
waits for their download; the one that runs serves on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from outrider_crds.base import digest
from outrider_crds.model_sources import ModelRef
from outrider_crds.prefetch_report import PREFETCH_REFUSED, PrefetchProgress
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import (
    JOB,
    PREFETCH,
    ApiRefusal,
    Object,
    Observed,
    OperatorSettings,
    ServiceIdentity,
)
from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.job_pods import has_succeeded, is_done, is_finished, pod_of, why_failed
from outrider_operator.decide.outcome import Outcome
from outrider_operator.decide.ownership import Children, owner_reference
from outrider_operator.decide.pod_spec.job import job_document, job_pod
from outrider_operator.decide.pod_spec.placement import resources_without_devices, scheduling
from outrider_operator.decide.pod_states import LOOK_AGAIN_S, why_not_running
from outrider_operator.decide.pod_troubles import has_ended, how_it_ended
from outrider_operator.decide.profiling.measurement_request import attempt_hash
from outrider_operator.decide.revisions import canary_revision_name, current_revision_name, revision_in
from outrider_operator.plan import Delete
from outrider_operator.validation.reading import (
    annotation,
    condition_of,
    controller_uid,
    cut,
    ended,
    integer,
    is_being_deleted,
    items,
    last_lines,
    name_of,
    text,
    uid_of,
)

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


@dataclass(frozen=True)
class Prefetch:
    """A service's prefetch at one look."""

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
    pod: Object | None = None
    """The Job's newest pod."""
    has_begun: bool = False
    """Does the Job's pod run, or has it succeeded?"""
    why_not_running: str = ""
    """What keeps the Job from having a pod, or the pod from downloading, in a sentence; empty while it does."""
    is_program_missing: bool = False
    """Is the runtime image one of a release that cannot prefetch?"""
    progress: PrefetchProgress | None = None
    refused: ApiRefusal | None = None
    """What the API server has against the Job."""

    @property
    def is_current(self) -> bool:
        """Does the Job download these models?"""
        return self.job is not None and annotation(self.job, KEY_ANNOTATION).partition("/")[0] == self.key

    @property
    def is_downloading(self) -> bool:
        return self.is_current and self.has_begun and not self.is_complete

    @property
    def is_complete(self) -> bool:
        return self.is_current and self.job is not None and has_succeeded(self.job, self.pod, DOWNLOADER)

    @property
    def has_failed(self) -> bool:
        """Failed with today's settings; with others it is tried again."""
        return self.is_of_these_settings and self.has_ended and not self.is_complete

    @property
    def has_ended(self) -> bool:
        return self.job is not None and is_done(self.job, self.pod, DOWNLOADER)

    @property
    def is_of_these_settings(self) -> bool:
        return self.job is not None and annotation(self.job, KEY_ANNOTATION) == f"{self.key}/{self.attempt}"

    @property
    def holds(self) -> bool:
        """Does the wanted revision wait for a download? Where the image has no such program, pods download."""
        return self.is_due and not self.is_complete and not (self.is_current and self.is_program_missing)


def prefetch_of(observed: Observed, children: Children, desired: DesiredState) -> Prefetch | None:
    """None for a service that downloads nothing into a claim."""
    spec = desired.spec
    models = hub_models(spec)
    if spec.model_cache.pvc is None or not models:
        return None
    claim = spec.model_cache.pvc.claim_name
    job = _own(observed.prefetch_jobs, observed.identity)
    pod = pod_of(job, observed.prefetch_pods) if job is not None else None
    return Prefetch(
        claim=claim,
        models=tuple(model.name for model in models),
        key=digest([claim, [[model.name, model.revision] for model in models]]),
        attempt=attempt_hash(spec, desired.image),
        is_due=_is_due(children, desired),
        job=job,
        pod=pod,
        has_begun=text(pod, "status", "phase") in ("Running", "Succeeded"),
        why_not_running=why_not_running(job, pod, observed.warnings, observed.at),
        is_program_missing=_is_program_missing(job, pod),
        progress=observed.prefetch_progress,
        refused=next((refusal for refusal in observed.refusals if refusal.component == PREFETCH), None),
    )


def hub_models(spec: SpeculativeServiceSpec) -> list[ModelRef]:
    """The target first, each once."""
    models = [model for model in spec.models.values() if model.source.hub is not None]
    return list({(model.name, model.revision): model for model in models}.values())


def plan_prefetch(
    observed: Observed, settings: OperatorSettings, desired: DesiredState, prefetch: Prefetch | None
) -> Outcome:
    """The Job, made again if it is another one's, or failed or waits with other settings.

    A complete one stays as the record of what is on the claim: a change of anything else needs no download."""
    job = _own(observed.prefetch_jobs, observed.identity)
    if job is not None and is_being_deleted(job):
        return Outcome(wake_after_s=2.0)
    if (
        prefetch is None
        or (job is not None and not prefetch.is_current)
        or _is_worth_retry(prefetch)
        or _lingers(prefetch)
    ):
        return Outcome(delete=_deletions(job), wake_after_s=2.0 if job is not None else None)
    if not prefetch.holds or desired.spec.paused:
        return Outcome()
    if job is None:
        return Outcome(create=(_job(observed.identity, settings, desired, prefetch),), wake_after_s=LOOK_AGAIN_S)
    return Outcome(wake_after_s=LOOK_AGAIN_S)


def _is_worth_retry(prefetch: Prefetch) -> bool:
    """Have the settings changed since the Job failed, or before its pod found a node and its image?"""
    if not prefetch.is_current or prefetch.is_complete or prefetch.is_of_these_settings:
        return False
    return prefetch.has_ended or not prefetch.has_begun


def _lingers(prefetch: Prefetch) -> bool:
    """Is the download done, and does only a sidecar keep its pod? It is needed until the models have pods."""
    is_held = prefetch.job is not None and not is_finished(prefetch.job)
    return prefetch.is_complete and is_held and not prefetch.is_due


def _is_due(children: Children, desired: DesiredState) -> bool:
    """Not for a revision that has pods: they have its models, or download them already."""
    revision = desired.spec_revision.name
    hosted = (current_revision_name(children), revision_in(children.canary))
    return not {revision, canary_revision_name(revision)} & set(hosted)


def _own(jobs: Iterable[Object], owner: ServiceIdentity) -> Object | None:
    return next((job for job in jobs if controller_uid(job) == owner.uid), None)


def _is_program_missing(job: Object | None, pod: Object | None) -> bool:
    """Is there no downloader in the image? The Job may tell the exit code of a pod that is gone."""
    end, failed = ended(pod, DOWNLOADER), condition_of(job or {}, "Failed")
    is_by_policy = failed.get("status") == "True" and text(failed, "reason") == "PodFailurePolicy"
    said = _EXIT_CODE.search(text(failed, "message")) if is_by_policy else None
    codes = {integer(end, "exitCode"), int(said[1]) if said else 0}
    # Any container that cannot be made ends with code 128; for want of its program, runc and crun name it.
    is_named = text(end, "reason") == "StartError" and _PROGRAM in text(end, "message")
    return is_named or not codes.isdisjoint(_NO_PROGRAM_CODES)


def failure(prefetch: Prefetch) -> str:
    """Why the download failed, in a sentence."""
    why = _last_words(prefetch) or why_failed(prefetch.job or {}) or "no reason given"
    models = ", ".join(prefetch.models)
    said = f"Downloading {models} into claim {prefetch.claim} failed: {why.rstrip('.')}"
    job = name_of(prefetch.job or {})
    return cut(f"{said}. Correct the spec, or delete Job {job} to try again.", 2048)


def _last_words(prefetch: Prefetch) -> str:
    """The downloader's, or how its pod ended where it never ran."""
    said = last_lines(text(ended(prefetch.pod, DOWNLOADER), "message"), _LAST_LINES)
    return said or (how_it_ended(prefetch.pod) if prefetch.pod is not None and has_ended(prefetch.pod) else "")


def _deletions(job: Object | None) -> tuple[Delete, ...]:
    return (Delete(JOB, name_of(job), uid_of(job), component=PREFETCH),) if job is not None else ()


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
    program = {
        "command": [_PROGRAM],
        "args": _arguments(spec),
        "resources": resources_without_devices(spec),
    }
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
    return {**fields, "tolerations": [*items(fields, "tolerations"), device]}


def _arguments(spec: SpeculativeServiceSpec) -> list[str]:
    """A target that is not there fails the Job; a draft is then left out by the pods, which say so."""
    target, *_ = spec.models.values()
    return [
        word
        for model in hub_models(spec)
        for word in ("--target" if model == target else "--draft", f"{model.name}@{model.revision or ''}")
    ]
