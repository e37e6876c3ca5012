"""The manifest of a profiling Job: one at a time for a target on a product, with only the requested measurements."""

from __future__ import annotations

import json
import math

from outrider_crds.base import digest, seconds
from outrider_crds.runtime_config import BootConfig, boot_config
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import PROFILING, Object, OperatorSettings, ServiceIdentity
from outrider_operator.decide.ownership import owner_reference
from outrider_operator.decide.pod_spec.job import job_document, job_pod
from outrider_operator.decide.pod_spec.placement import scheduling
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profiling.measurement_request import MeasurementRequest, annotations_of
from outrider_operator.validation.reports import PROFILER

NODES_ANNOTATION = "outrider.dev/nodes"
_MARK_LENGTH = 6
_RESULT_FILE = "/dev/termination-log"
_SHARED_NAME = "outrider-profile"
"""Service and revision in the Job's boot config: several services share the measurement."""


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
