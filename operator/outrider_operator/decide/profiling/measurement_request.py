"""The measurements that one profiling Job is to make, their form as annotations of the Job, and their outcome.

The outcome is a result, a failure that the Job reports, or unreadable output, which is a failure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from outrider_crds.base import digest
from outrider_crds.profile import HUB_UNAVAILABLE, REPROFILE_ANNOTATION, ProfilingResult
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.spec import SpeculativeServiceSpec
from pydantic_core import from_json

from outrider_operator.cluster_model import Object
from outrider_operator.decide.desired.profile_store import FIRST_RETRY_S, Failure, Store
from outrider_operator.decide.pods.job_pods import why_failed
from outrider_operator.decide.pods.pod_troubles import has_ended, how_it_ended
from outrider_operator.validation import reading
from outrider_operator.validation.reports import Termination, termination_of

MEASUREMENT_ANNOTATION = "outrider.dev/asked"
ATTEMPT_ANNOTATION = "outrider.dev/attempt"
_MESSAGE_LIMIT = 1024
_LAST_LINES = 6


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
        document = from_json(reading.annotation(job, MEASUREMENT_ANNOTATION))
        keys = ProfileKeys.model_validate(document["keys"], extra="ignore")
        request = MeasurementRequest(
            keys=keys,
            target=bool(document["target"]),
            drafters=tuple(name for name in document["drafters"] if name in keys.drafters),
            attempt=reading.annotation(job, ATTEMPT_ANNOTATION),
            reprofile=reading.annotation(job, REPROFILE_ANNOTATION),
        )
    except (ValueError, KeyError, TypeError):
        return None
    return request


def annotations_of(request: MeasurementRequest) -> dict[str, str]:
    document = {"keys": request.keys.wire(), "target": request.target, "drafters": list(request.drafters)}
    annotations = {MEASUREMENT_ANNOTATION: json.dumps(document), ATTEMPT_ANNOTATION: request.attempt}
    return annotations | ({REPROFILE_ANNOTATION: request.reprofile} if request.reprofile else {})


def is_running(pod: Object | None) -> bool:
    return reading.text(pod, "status", "phase") == "Running"


def absorb(store: Store, job: Object, pod: Object | None, request: MeasurementRequest) -> Store:
    """`store` plus the outcome of `job`. Repeating it changes nothing, which shows that the outcome is stored."""
    words = termination_of(pod)
    if words is None or isinstance(words.result, reading.InvalidInput):
        return _with_failures(store, request, dict.fromkeys(request.measured_keys, _died(job, pod, words)))
    return _with_result(store, job, request, words.result)


def _with_result(store: Store, job: Object, request: MeasurementRequest, result: ProfilingResult) -> Store:
    """Add what was requested. A requested key that the result does not mention has failed, too."""
    if result.target is not None and request.target and result.target.key == request.keys.target:
        store = store.with_target(result.target)
    for drafter in result.drafters:
        store = store.with_drafter(drafter) if drafter.key in request.measured_keys else store
    what = "The profiling Job reported neither a measurement nor a failure; profiling.timeBudget may be too small"
    failures = dict.fromkeys(request.measured_keys, _failure(job, "NotMeasured", what, may_pass=False))
    for failure in result.failures:
        why = _failure(job, failure.reason, failure.message, may_pass=failure.reason == HUB_UNAVAILABLE)
        failures |= dict.fromkeys(_failed_keys(request, failure.drafter), why)
    measured = {result.target.key if result.target else "", *(drafter.key for drafter in result.drafters)}
    return _with_failures(store, request, {key: why for key, why in failures.items() if key not in measured})


def _with_failures(store: Store, request: MeasurementRequest, failures: Mapping[str, Failure]) -> Store:
    for key, failure in failures.items():
        store = store.with_failure(key, request.attempt, failure)
    return store.with_request(request.reprofile)


def _failure(job: Object, reason: str, message: str, *, may_pass: bool) -> Failure:
    again_at = reading.created_s(job) + FIRST_RETRY_S if may_pass else 0.0
    return Failure(reason=reason, message=message, job=reading.uid_of(job), tries=int(may_pass), again_at=again_at)


def _failed_keys(request: MeasurementRequest, drafter: str) -> tuple[str, ...]:
    """Keys that a failure concerns: the drafter's key, or all keys if the target failed."""
    if not drafter:
        return request.measured_keys
    return (request.keys.drafters[drafter],) if drafter in request.drafters else ()


def _died(job: Object, pod: Object | None, words: Termination | None) -> Failure:
    """A failure described by the profiler's last lines; without any, by how the pod ended, or by the Job controller."""
    said = reading.last_lines(words.message, _LAST_LINES) if words is not None else ""
    is_late = reading.text(pod, "status", "reason") == "DeadlineExceeded"
    if is_late:
        what = "It ran longer than profiling.timeout and was stopped"
    elif words is not None and words.exit_code == 0 and isinstance(words.result, reading.InvalidInput):
        what = f"It left no result that can be read ({words.result.detail})"
    elif words is not None:
        what = f"It ended with exit code {words.exit_code} ({words.reason or 'no reason given'})"
    elif pod is not None and has_ended(pod):
        what = how_it_ended(pod)
    else:
        what = why_failed(job) or "Its pod left no result"
    last = f"; its last lines: {said}" if said else ""
    # A container that never ran, or was not made, says nothing of what it should have measured.
    may_pass = words.reason == "StartError" if words is not None else not is_late
    return _failure(job, "JobFailed", reading.cut(what + last, _MESSAGE_LIMIT), may_pass=may_pass)
