"""The profile ConfigMap: measurements for a target on a product, and failures.

Data: `target.json`, `<drafter key>.json`, and `failures.json`, which maps key -> attempt -> failure. An attempt is
the hash of the settings that a measurement ran under (see `measurement_request`). A failed key is measured again when
these change, and services that share a profile do not repeat each other's failures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from outrider_crds.profile import REPROFILE_ANNOTATION, TARGET_FILE, DrafterProfile, TargetProfile
from outrider_crds.profile_keys import ProfileKeys
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json

from outrider_operator.cluster_model import Object
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.validation.reading import annotation, mapping, text

FAILURES_FILE = "failures.json"
_DRAFTER_FILE = re.compile(r"[0-9a-f]{1,64}\.json")
"""Name of a drafter's file. Other files are ignored, and removed when the next measurement is stored."""
FIRST_RETRY_S, LONGEST_RETRY_S = 900.0, 6 * 3600.0
"""Waits before a measurement that failed for a reason that may pass is tried again; each is twice the last one."""
_KEYS_KEPT = 64
"""Keys whose failures are kept: a target and the drafters of all services that share it."""
_ATTEMPTS_KEPT = 16
_REQUESTS_KEPT = 16


class Failure(BaseModel):
    """A measurement that failed, and the Job (by uid) that tried it."""

    model_config = ConfigDict(frozen=True)

    reason: str
    message: str
    job: str
    tries: int = 0
    """Jobs that failed so in turn, where another attempt may succeed; 0 where only other settings help."""
    again_at: float = 0.0
    """Unix time of the next attempt under the same settings."""


Failures = dict[str, dict[str, Failure]]
_FAILURES = TypeAdapter(Failures)
_P = TypeVar("_P", TargetProfile, DrafterProfile)
_V = TypeVar("_V")


@dataclass(frozen=True)
class Store:
    target: TargetProfile | None = None
    drafters: dict[str, DrafterProfile] = field(default_factory=dict)
    """Drafter key -> profile."""
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
        before = self.failure(key, attempt)
        if before is not None and failure.tries and before.job != failure.job:
            wait_s = min(FIRST_RETRY_S * 2**before.tries, LONGEST_RETRY_S)
            repeated = {"tries": before.tries + 1, "again_at": failure.again_at - FIRST_RETRY_S + wait_s}
            failure = failure.model_copy(update=repeated)
        elif before is not None and before.job == failure.job:
            failure = before
        attempts = {name: old for name, old in self.failures.get(key, {}).items() if name != attempt}
        kept = _last({**attempts, attempt: failure}, _ATTEMPTS_KEPT)
        return replace(self, failures=_last({**_without(self.failures, key), key: kept}, _KEYS_KEPT))

    def with_request(self, request: str) -> Store:
        if not request or request in self.requests:
            return self
        return replace(self, requests=(*self.requests, request)[-_REQUESTS_KEPT:])


@dataclass(frozen=True)
class Profiles:
    """The profiles of a namespace, or those for all. Each is parsed at most once, and only if it is needed: it may be
    large."""

    documents: Mapping[str, Object] = field(default_factory=dict)
    """Name -> ConfigMap."""
    _stores: dict[str, Store] = field(default_factory=dict, init=False, repr=False, compare=False)

    def store(self, target_key: str) -> Store:
        return self.named(profile_name(target_key))

    def named(self, name: str) -> Store:
        if name not in self._stores:
            self._stores[name] = read_store(self.documents.get(name))
        return self._stores[name]


def read_store(document: Object | None) -> Store:
    """Parse a profile ConfigMap. A part that cannot be read counts as not measured."""
    data = mapping(document, "data")
    measured = ((file, _parse(DrafterProfile, text(data, file))) for file in data if _DRAFTER_FILE.fullmatch(file))
    return Store(
        target=_parse(TargetProfile, text(data, TARGET_FILE)),
        drafters={
            profile.key: profile for file, profile in measured if profile is not None and file == _file(profile.key)
        },
        failures=_parse_failures(text(data, FAILURES_FILE)),
        requests=tuple(annotation(document or {}, REPROFILE_ANNOTATION).split()),
    )


def store_data(store: Store) -> dict[str, str]:
    """Data of the ConfigMap for `store`."""
    files: dict[str, Any] = {_file(key): profile.wire() for key, profile in store.drafters.items()}
    if store.target is not None:
        files[TARGET_FILE] = store.target.wire()
    if store.failures:
        files[FAILURES_FILE] = _FAILURES.dump_python(store.failures)
    return {name: json.dumps(document) for name, document in sorted(files.items())}


def _parse(model: type[_P], document: str) -> _P | None:
    try:
        return model.read(document)
    except ValidationError:
        return None


def _parse_failures(document: str) -> Failures:
    """The newest failures only: a ConfigMap that was filled by others may hold thousands."""
    try:
        newest = _last(from_json(document or "{}"), _KEYS_KEPT)
        return _FAILURES.validate_python({key: _last(attempts, _ATTEMPTS_KEPT) for key, attempts in newest.items()})
    except (ValueError, AttributeError):
        return {}


def _last(entries: dict[str, _V], most: int) -> dict[str, _V]:
    return dict(islice(entries.items(), max(0, len(entries) - most), None))


def _file(drafter_key: str) -> str:
    return f"{drafter_key}.json"


def _without(failures: Failures, key: str) -> Failures:
    return {name: attempts for name, attempts in failures.items() if name != key}
