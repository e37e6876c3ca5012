"""The measurements that one profiling Job is to make, and their form as annotations of the Job."""

from __future__ import annotations

import json
from dataclasses import dataclass

from outrider_crds.base import digest
from outrider_crds.profile import REPROFILE_ANNOTATION
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.spec import SpeculativeServiceSpec
from pydantic_core import from_json

from outrider_operator.cluster_model import Object
from outrider_operator.validation.reading import annotation

MEASUREMENT_ANNOTATION = "outrider.dev/asked"
ATTEMPT_ANNOTATION = "outrider.dev/attempt"


@dataclass(frozen=True)
class MeasurementRequest:
    """Measurements of one Job. It is false if there is nothing to measure."""

    keys: ProfileKeys
    target: bool
    drafters: tuple[str, ...]
    """Names in the order of the draft pool."""
    attempt: str
    reprofile: str
    """Digest of the `outrider.dev/reprofile` value that it answers; empty without one."""

    @property
    def measured_keys(self) -> tuple[str, ...]:
        target = (self.keys.target,) if self.target else ()
        return (*target, *(self.keys.drafters[name] for name in self.drafters))

    def __bool__(self) -> bool:
        return self.target or bool(self.drafters)


def attempt_hash(spec: SpeculativeServiceSpec, image: str) -> str:
    """Hash of the settings other than the profile keys that decide whether a measurement can succeed."""
    included = {"accelerator", "model_cache", "ca_bundle", "pod_template"}
    fields = spec.model_dump(mode="json", by_alias=True, include=included, exclude_defaults=True)
    tokens = [ref.wire() for ref in spec.token_refs]
    settings = {"fields": fields, "image": image, "profiling": [spec.profiling.timeout, spec.profiling.time_budget]}
    return digest(settings | ({"tokens": tokens} if tokens else {}))


def request_of(job: Object) -> MeasurementRequest | None:
    """The measurements in the annotation of `job`; None if it cannot be read."""
    try:
        document = from_json(annotation(job, MEASUREMENT_ANNOTATION))
        keys = ProfileKeys.model_validate(document["keys"], extra="ignore")
        request = MeasurementRequest(
            keys=keys,
            target=bool(document["target"]),
            drafters=tuple(name for name in document["drafters"] if name in keys.drafters),
            attempt=annotation(job, ATTEMPT_ANNOTATION),
            reprofile=annotation(job, REPROFILE_ANNOTATION),
        )
    except (ValueError, KeyError, TypeError):
        return None
    return request


def annotations_of(request: MeasurementRequest) -> dict[str, str]:
    document = {"keys": request.keys.wire(), "target": request.target, "drafters": list(request.drafters)}
    annotations = {MEASUREMENT_ANNOTATION: json.dumps(document), ATTEMPT_ANNOTATION: request.attempt}
    return annotations | ({REPROFILE_ANNOTATION: request.reprofile} if request.reprofile else {})
