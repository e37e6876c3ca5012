"""What one profiling Job measures, and how its annotations say so."""

from __future__ import annotations

import json
from dataclasses import dataclass

from outrider_crds.base import digest
from outrider_crds.profile import REPROFILE_ANNOTATION, ProfileKeys
from outrider_crds.spec import SpeculativeServiceSpec
from pydantic_core import from_json

from outrider_operator.inbound.reading import annotation
from outrider_operator.model import Object

ASKED_ANNOTATION = "outrider.dev/asked"
ATTEMPT_ANNOTATION = "outrider.dev/attempt"


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
    tokens = [ref.wire() for ref in spec.token_refs]
    settings = {"fields": fields, "image": image, "profiling": [spec.profiling.timeout, spec.profiling.time_budget]}
    return digest(settings | ({"tokens": tokens} if tokens else {}))


def asked_of(job: Object) -> Asked | None:
    """What `job` measures, as its annotation says; None when that is not readable."""
    try:
        document = from_json(annotation(job, ASKED_ANNOTATION))
        keys = ProfileKeys.model_validate(document["keys"], extra="ignore")
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


def annotations_of(asked: Asked) -> dict[str, str]:
    document = {"keys": asked.keys.wire(), "target": asked.target, "drafters": list(asked.drafters)}
    annotations = {ASKED_ANNOTATION: json.dumps(document), ATTEMPT_ANNOTATION: asked.attempt}
    return annotations | ({REPROFILE_ANNOTATION: asked.request} if asked.request else {})
