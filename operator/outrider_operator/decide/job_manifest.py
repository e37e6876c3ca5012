"""The profiling Job: one at a time for a target on a product, measuring only what is asked."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from outrider_crds.base import digest, seconds
from outrider_crds.profile import REPROFILE_ANNOTATION, ProfileKeys
from outrider_crds.runtime_config import BootConfig, boot_config
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.decide.container import container, pod_fields
from outrider_operator.decide.ownership import labels, owner_reference
from outrider_operator.decide.placement import scheduling
from outrider_operator.decide.reading import annotation
from outrider_operator.decide.volumes import model_volumes, profile_name, scratch_volumes
from outrider_operator.model import JOB, PROFILING, Object, Observed, Settings

ASKED_ANNOTATION = "outrider.dev/asked"
ATTEMPT_ANNOTATION = "outrider.dev/attempt"
_RESULT_FILE = "/dev/termination-log"
_NOBODY = "outrider-profile"
"""Stands for service and revision in the Job's boot config: what it measures is no single service's."""


@dataclass(frozen=True)
class Asked:
    """What one Job measures."""

    keys: ProfileKeys
    target: bool
    drafters: tuple[str, ...]
    """Names, in the order of the pool."""
    attempt: str
    request: str
    """Digest of the `outrider.dev/reprofile` value that it serves; empty without one."""

    @property
    def measured_keys(self) -> tuple[str, ...]:
        target = (self.keys.target,) if self.target else ()
        return (*target, *(self.keys.drafters[name] for name in self.drafters))

    def __bool__(self) -> bool:
        return self.target or bool(self.drafters)


def attempt_hash(spec: SpeculativeServiceSpec, image: str) -> str:
    """Hash of the settings, beyond the keys, that decide whether a measurement can succeed."""
    fields = spec.model_dump(
        mode="json", by_alias=True, include={"accelerator", "model_cache", "pod_template"}, exclude_defaults=True
    )
    return digest({"fields": fields, "image": image, "profiling": [spec.profiling.timeout, spec.profiling.time_budget]})


def job_manifest(
    observed: Observed, settings: Settings, spec: SpeculativeServiceSpec, image: str, asked: Asked
) -> Object:
    """The Job for `asked`. Its name is the target key's: the API server itself keeps a second one out."""
    metadata_labels = labels(observed.name, PROFILING)
    return {
        "apiVersion": "batch/v1",
        "kind": JOB,
        "metadata": {
            "name": profile_name(asked.keys.target),
            "namespace": observed.namespace,
            "labels": metadata_labels,
            "annotations": _annotations(asked),
            # Not as controller: services that want the same measurement each add themselves.
            "ownerReferences": [owner_reference(observed, controller=False)],
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
                "metadata": {"labels": metadata_labels},
                "spec": _pod(spec, settings, image, asked, _config(observed, spec, image)),
            },
        },
    }


def asked_of(job: Object) -> Asked | None:
    """What `job` measures, as its annotation says; None when that is not readable."""
    try:
        document = json.loads(annotation(job, ASKED_ANNOTATION))
        keys = ProfileKeys.model_validate(document["keys"])
        asked = Asked(
            keys=keys,
            target=bool(document["target"]),
            drafters=tuple(name for name in document["drafters"] if name in keys.drafters),
            attempt=annotation(job, ATTEMPT_ANNOTATION),
            request=annotation(job, REPROFILE_ANNOTATION),
        )
    except (ValueError, KeyError, TypeError):
        return None
    return asked


def _annotations(asked: Asked) -> dict[str, str]:
    document = {"keys": asked.keys.wire(), "target": asked.target, "drafters": list(asked.drafters)}
    annotations = {ASKED_ANNOTATION: json.dumps(document), ATTEMPT_ANNOTATION: asked.attempt}
    return annotations | ({REPROFILE_ANNOTATION: asked.request} if asked.request else {})


def _config(observed: Observed, spec: SpeculativeServiceSpec, image: str) -> BootConfig:
    return boot_config(
        spec,
        service=_NOBODY,
        namespace=observed.namespace,
        revision=_NOBODY,
        image=image,
        max_draft_tokens=spec.speculation.max_draft_tokens,
    )


def _pod(spec: SpeculativeServiceSpec, settings: Settings, image: str, asked: Asked, config: BootConfig) -> Object:
    volumes = [*model_volumes(spec), *scratch_volumes()]
    profiler = {
        **container(spec, "profiler", image, settings.image_pull_policy, volumes),
        "command": ["outrider-profile"],
        "args": _arguments(spec, asked, config),
    }
    fields: Object = {
        **pod_fields(spec, volumes),
        **scheduling(spec, [asked.keys.product]),
        "restartPolicy": "Never",
        # On the pod, not on the Job: it counts from the start of the pod, so that waiting for a free GPU is no
        # failure, and the pod that ran too long stays, with its last lines.
        "activeDeadlineSeconds": max(1, math.ceil(seconds(spec.profiling.timeout))),
        "terminationGracePeriodSeconds": 10,
        "containers": [profiler],
    }
    if settings.profiling_priority_class:
        fields["priorityClassName"] = settings.profiling_priority_class
    return fields


def _arguments(spec: SpeculativeServiceSpec, asked: Asked, config: BootConfig) -> list[str]:
    arguments = ["--config-json", json.dumps(config.wire(), sort_keys=True), "--product", asked.keys.product]
    arguments += ["--target"] if asked.target else []
    for name in asked.drafters:
        arguments += ["--drafter", name]
    return [*arguments, "--time-budget", spec.profiling.time_budget, "--result", _RESULT_FILE]
