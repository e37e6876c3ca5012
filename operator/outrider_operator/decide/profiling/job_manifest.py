"""The profiling Job: one at a time for a target on a product, measuring only what is asked."""

from __future__ import annotations

import json
import math

from outrider_crds.base import digest, seconds
from outrider_crds.runtime_config import BootConfig, boot_config
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.decide.ownership import labels, owner_reference
from outrider_operator.decide.pod_spec.container import container, pod_fields
from outrider_operator.decide.pod_spec.patch import patched
from outrider_operator.decide.pod_spec.placement import scheduling
from outrider_operator.decide.pod_spec.volumes import model_volumes, profile_name, scratch_volumes
from outrider_operator.decide.profiling.asked import Asked, annotations_of
from outrider_operator.inbound.results import PROFILER
from outrider_operator.model import JOB, PROFILING, Identity, Object, Settings

NODES_ANNOTATION = "outrider.dev/nodes"
_MARK_LENGTH = 6
_RESULT_FILE = "/dev/termination-log"
_NOBODY = "outrider-profile"
"""Stands for service and revision in the Job's boot config: what it measures is no single service's."""


def job_manifest(
    owner: Identity,
    settings: Settings,
    spec: SpeculativeServiceSpec,
    image: str,
    asked: Asked,
    hostnames: tuple[str, ...] = (),
) -> Object:
    """The Job for `asked`. Its name is the target key's: the API server itself keeps a second one out.

    Its pod runs on one of `hostnames`; without any, on every node that fits.
    """
    # The user's too, on Job and pod: queues, meshes and policies go by them.
    metadata_labels = {**spec.pod_template.labels, **labels(owner.name, PROFILING)}
    return {
        "apiVersion": "batch/v1",
        "kind": JOB,
        "metadata": {
            "name": profile_name(asked.keys.target),
            "namespace": owner.namespace,
            "labels": metadata_labels,
            "annotations": {
                **spec.pod_template.annotations,
                **annotations_of(asked),
                NODES_ANNOTATION: nodes_mark(hostnames),
            },
            # Not as controller: services that want the same measurement each add themselves.
            "ownerReferences": [owner_reference(owner, controller=False)],
        },
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {
                "metadata": {"labels": metadata_labels, "annotations": dict(spec.pod_template.annotations)},
                "spec": _pod(spec, settings, image, asked, _config(owner, spec, image), hostnames),
            },
        },
    }


def _config(owner: Identity, spec: SpeculativeServiceSpec, image: str) -> BootConfig:
    return boot_config(
        spec,
        service=_NOBODY,
        namespace=owner.namespace,
        revision=_NOBODY,
        image=image,
        max_draft_tokens=spec.speculation.max_draft_tokens,
    )


def nodes_mark(hostnames: tuple[str, ...]) -> str:
    """Digests of the nodes that a Job may run on: its pod template is not kept in the cache."""
    return " ".join(digest(hostname, _MARK_LENGTH) for hostname in hostnames)


def _pod(
    spec: SpeculativeServiceSpec,
    settings: Settings,
    image: str,
    asked: Asked,
    config: BootConfig,
    hostnames: tuple[str, ...],
) -> Object:
    volumes = [*model_volumes(spec), *scratch_volumes()]
    profiler = {
        **container(spec, settings, PROFILER, image, volumes),
        "command": ["outrider-profile"],
        "args": _arguments(spec, asked, config),
    }
    fields: Object = {
        **pod_fields(spec, settings, volumes),
        **scheduling(spec, [asked.keys.product], hostnames),
        "restartPolicy": "Never",
        # On the pod, not on the Job: it counts from the start of the pod, so that waiting for a free GPU is no
        # failure, and the pod that ran too long stays, with its last lines.
        "activeDeadlineSeconds": max(1, math.ceil(seconds(spec.profiling.timeout))),
        "terminationGracePeriodSeconds": 10,
        "containers": [profiler],
    }
    if settings.profiling_priority_class:
        fields["priorityClassName"] = settings.profiling_priority_class
    return patched(fields, spec.pod_template, PROFILER, serving=False)


def _arguments(spec: SpeculativeServiceSpec, asked: Asked, config: BootConfig) -> list[str]:
    arguments = ["--config-json", json.dumps(config.wire(), sort_keys=True), "--product", asked.keys.product]
    arguments += ["--target"] if asked.target else []
    for name in asked.drafters:
        arguments += ["--drafter", name]
    return [*arguments, "--time-budget", spec.profiling.time_budget, "--result", _RESULT_FILE]
