"""One download of a service's hub models into its claim, before pods and profiling Jobs need them.

Without it eight pods and a Job download a target of 140 GB each, and hinder one another. A revision that names models
waits for their download; the one that runs serves on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from outrider_crds.base import digest
from outrider_crds.prefetch_report import PrefetchProgress
from outrider_crds.spec import ModelRef, SpeculativeServiceSpec

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
from outrider_operator.decide.ownership import Children, owner_reference
from outrider_operator.decide.pod_spec.job import job_document, job_pod
from outrider_operator.decide.pod_spec.placement import resources_without_devices, scheduling
from outrider_operator.decide.pod_states import LOOK_AGAIN_S, pods_of
from outrider_operator.decide.profiling.job_outcome import pod_of
from outrider_operator.decide.profiling.measurement_request import attempt_hash
from outrider_operator.decide.revisions import canary_revision_name, current_revision_name, revision_in
from outrider_operator.plan import Delete
from outrider_operator.validation.reading import (
    annotation,
    condition_of,
    controller_uid,
    cut,
    integer,
    is_being_deleted,
    is_true,
    items,
    last_lines,
    mapping,
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
_NO_PROGRAM_CODES = frozenset({126, 127, 128})
"""Exit codes of a container whose command is not in its image."""
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
    has_begun: bool = False
    """Does the Job's pod run, or has it succeeded?"""
    why_not_running: str = ""
    """What keeps the Job from having a pod, or the pod from downloading, in a sentence; empty while it does."""
    is_program_missing: bool = False
    """Is the runtime image one of a release that cannot prefetch?"""
    last_lines: str = ""
    """Last words of a download that failed."""
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
        return self.is_current and self.job is not None and is_true(self.job, "Complete")

    @property
    def has_failed(self) -> bool:
        """Failed with today's settings; with others it is tried again."""
        return self.is_of_these_settings and is_true(self.job or {}, "Failed")

    @property
    def is_of_these_settings(self) -> bool:
        return self.job is not None and annotation(self.job, KEY_ANNOTATION) == f"{self.key}/{self.attempt}"

    @property
    def holds(self) -> bool:
        """Does the wanted revision wait for a download? Where the image has no such program, pods download."""
        return self.is_due and not self.is_complete and not (self.is_current and self.is_program_missing)


@dataclass(frozen=True)
class PrefetchPlan:
    create: tuple[Object, ...] = ()
    delete: tuple[Delete, ...] = ()
    requeue_after_s: float | None = None


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
        has_begun=text(pod, "status", "phase") in ("Running", "Succeeded"),
        why_not_running=_why_not_running(observed, job, pod),
        is_program_missing=not _NO_PROGRAM_CODES.isdisjoint(_exit_codes(job, pod)),
        last_lines=_last_lines(pod),
        progress=observed.prefetch_progress,
        refused=next((refusal for refusal in observed.refusals if refusal.component == PREFETCH), None),
    )


def hub_models(spec: SpeculativeServiceSpec) -> list[ModelRef]:
    """The target first, each once."""
    models = [model for model in spec.models.values() if model.source.hub is not None]
    return list({(model.name, model.revision): model for model in models}.values())


def plan_prefetch(
    observed: Observed, settings: OperatorSettings, desired: DesiredState, prefetch: Prefetch | None
) -> PrefetchPlan:
    """The Job, made again if it is another one's, or failed or waits with other settings.

    A complete one stays as the record of what is on the claim: a change of anything else needs no download."""
    job = _own(observed.prefetch_jobs, observed.identity)
    if job is not None and is_being_deleted(job):
        return PrefetchPlan(requeue_after_s=2.0)
    if prefetch is None or (job is not None and not prefetch.is_current) or _is_worth_retry(prefetch):
        return PrefetchPlan(delete=_deletions(job), requeue_after_s=2.0 if job is not None else None)
    if not prefetch.holds or desired.spec.paused:
        return PrefetchPlan()
    if job is None:
        return PrefetchPlan(
            create=(_job(observed.identity, settings, desired, prefetch),), requeue_after_s=LOOK_AGAIN_S
        )
    return PrefetchPlan(requeue_after_s=LOOK_AGAIN_S)


def _is_worth_retry(prefetch: Prefetch) -> bool:
    """Have the settings changed since the Job failed, or before its pod found a node and its image?"""
    if not prefetch.is_current or prefetch.is_complete or prefetch.is_of_these_settings:
        return False
    return is_true(prefetch.job or {}, "Failed") or not prefetch.has_begun


def _is_due(children: Children, desired: DesiredState) -> bool:
    """Not for a revision that has pods: they have its models, or download them already."""
    revision = desired.spec_revision.name
    hosted = (current_revision_name(children), revision_in(children.canary))
    return not {revision, canary_revision_name(revision)} & set(hosted)


def _own(jobs: Iterable[Object], owner: ServiceIdentity) -> Object | None:
    return next((job for job in jobs if controller_uid(job) == owner.uid), None)


def _why_not_running(observed: Observed, job: Object | None, pod: Object | None) -> str:
    if pod is None:
        return cut(observed.warnings.get(name_of(job or {}), ""), 500)
    if text(pod, "status", "phase") != "Pending":
        return ""
    return pods_of(None, [pod], observed.warnings, observed.at).why_not_ready()


def _last_lines(pod: Object | None) -> str:
    """The last words of the container that ended."""
    said = next((text(ending, "message") for ending in _endings(pod)), "")
    return last_lines(said, _LAST_LINES)


def _endings(pod: Object | None) -> list[Object]:
    """How the pod's containers ended."""
    ended = (mapping(status, "state", "terminated") for status in items(pod, "status", "containerStatuses"))
    return [ending for ending in ended if ending]


def _exit_codes(job: Object | None, pod: Object | None) -> set[int]:
    """Exit codes of the downloader. The Job keeps the one that ended it; its pod may be gone."""
    failed = condition_of(job or {}, "Failed")
    by_policy = failed.get("status") == "True" and text(failed, "reason") == "PodFailurePolicy"
    said = _EXIT_CODE.search(text(failed, "message")) if by_policy else None
    return {*(integer(ending, "exitCode") for ending in _endings(pod)), *([int(said[1])] if said else [])}


def failure(prefetch: Prefetch) -> str:
    """Why the download failed, in a sentence."""
    why = prefetch.last_lines or text(condition_of(prefetch.job or {}, "Failed"), "message") or "no reason given"
    models = ", ".join(prefetch.models)
    said = f"Downloading {models} into claim {prefetch.claim} failed: {why.rstrip('.')}"
    job = name_of(prefetch.job or {})
    return cut(f"{said}. Correct the spec, or delete Job {job} to try again.", 2048)


def _deletions(job: Object | None) -> tuple[Delete, ...]:
    return (Delete(JOB, name_of(job), uid_of(job), component=PREFETCH),) if job is not None else ()


def _job(owner: ServiceIdentity, settings: OperatorSettings, desired: DesiredState, prefetch: Prefetch) -> Object:
    spec = desired.spec
    metadata = {
        "name": f"{owner.name}-prefetch",
        "annotations": {KEY_ANNOTATION: f"{prefetch.key}/{prefetch.attempt}"},
        "ownerReferences": [owner_reference(owner, controller=True)],
    }
    codes = {"containerName": DOWNLOADER, "operator": "In", "values": sorted(_NO_PROGRAM_CODES)}
    no_program = {"action": "FailJob", "onExitCodes": codes}
    pod = _pod(settings, spec, desired.image)
    return job_document(owner, spec, PREFETCH, metadata, pod, retries=_RETRIES, failures=(no_program,))


def _pod(settings: OperatorSettings, spec: SpeculativeServiceSpec, image: str) -> Object:
    """A pod that needs the claim and no GPU, on a node where serving pods may run: some claims bind a volume in the
    zone of their first pod."""
    program = {
        "command": ["outrider-prefetch"],
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
