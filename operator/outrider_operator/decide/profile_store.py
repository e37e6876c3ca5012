"""The profile ConfigMap: what has been measured for a target on a product, and what could not be.

Data: `target.json`, `<drafter key>.json`, and `failures.json`, which maps key -> attempt -> failure. An attempt is
the hash of the settings that a measurement ran under (see `asked`), so that a failed key runs again when
those change, and services that share a profile do not take turns at failing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from outrider_crds.profile import (
    REPROFILE_ANNOTATION,
    TARGET_FILE,
    DrafterProfile,
    ProfileKeys,
    ProfilingFailure,
    TargetProfile,
)
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from outrider_operator.inbound.reading import annotation, mapping, text
from outrider_operator.model import Object

FAILURES_FILE = "failures.json"
_ATTEMPTS_KEPT = 16
_REQUESTS_KEPT = 16


class Failure(BaseModel):
    """A measurement that failed, and the Job (by uid) that tried it."""

    model_config = ConfigDict(frozen=True)

    reason: str
    message: str
    job: str


Failures = dict[str, dict[str, Failure]]
_P = TypeVar("_P", TargetProfile, DrafterProfile)


@dataclass(frozen=True)
class Store:
    target: TargetProfile | None = None
    drafters: dict[str, DrafterProfile] = field(default_factory=dict)
    """By drafter key."""
    failures: Failures = field(default_factory=dict)
    requests: tuple[str, ...] = ()
    """Digests of the `outrider.dev/reprofile` values that have been served."""

    def covers(self, keys: ProfileKeys) -> bool:
        """True when the target and each drafter of `keys` is measured."""
        return self.has_target(keys) and all(key in self.drafters for key in keys.drafters.values())

    def has_target(self, keys: ProfileKeys) -> bool:
        return self.target is not None and self.target.key == keys.target

    def failure(self, key: str, attempt: str) -> Failure | None:
        return self.failures.get(key, {}).get(attempt)

    def with_target(self, profile: TargetProfile) -> Store:
        return replace(self, target=profile, failures=_without(self.failures, profile.key))

    def with_drafter(self, profile: DrafterProfile) -> Store:
        drafters = {**self.drafters, profile.key: profile}
        return replace(self, drafters=drafters, failures=_without(self.failures, profile.key))

    def with_failure(self, key: str, attempt: str, failure: Failure) -> Store:
        attempts = {name: old for name, old in self.failures.get(key, {}).items() if name != attempt}
        kept = dict([*attempts.items(), (attempt, failure)][-_ATTEMPTS_KEPT:])
        return replace(self, failures={**self.failures, key: kept})

    def with_request(self, request: str) -> Store:
        if not request or request in self.requests:
            return self
        return replace(self, requests=(*self.requests, request)[-_REQUESTS_KEPT:])


def read_store(document: Object | None) -> Store:
    """What `document` holds; a part that someone made unreadable counts as not measured."""
    data = mapping(document, "data")
    measured = (_parse(DrafterProfile, text(data, file)) for file in data if file not in (TARGET_FILE, FAILURES_FILE))
    return Store(
        target=_parse(TargetProfile, text(data, TARGET_FILE)),
        drafters={profile.key: profile for profile in measured if profile is not None},
        failures=_parse_failures(text(data, FAILURES_FILE)),
        requests=tuple(annotation(document or {}, REPROFILE_ANNOTATION).split()),
    )


def store_data(store: Store) -> dict[str, str]:
    """The ConfigMap's data for `store`."""
    files: dict[str, Any] = {f"{key}.json": profile.wire() for key, profile in store.drafters.items()}
    if store.target is not None:
        files[TARGET_FILE] = store.target.wire()
    if store.failures:
        files[FAILURES_FILE] = {
            key: {attempt: failure.model_dump() for attempt, failure in attempts.items()}
            for key, attempts in store.failures.items()
        }
    return {name: json.dumps(document) for name, document in sorted(files.items())}


def failed(failure: ProfilingFailure, job: str) -> Failure:
    return Failure(reason=failure.reason, message=failure.message, job=job)


def _parse(model: type[_P], document: str) -> _P | None:
    try:
        return model.read(document)
    except ValidationError:
        return None


def _parse_failures(document: str) -> Failures:
    try:
        return {
            key: {attempt: Failure.model_validate(failure, extra="ignore") for attempt, failure in attempts.items()}
            for key, attempts in from_json(document or "{}").items()
        }
    except (ValueError, AttributeError):
        return {}


def _without(failures: Failures, key: str) -> Failures:
    return {name: attempts for name, attempts in failures.items() if name != key}
