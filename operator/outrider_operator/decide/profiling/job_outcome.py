"""The outcome of a finished profiling Job: a result, a failure that it reports, or unreadable output (a failure)."""

from __future__ import annotations

from outrider_crds.profile import HUB_UNAVAILABLE, ProfilingFailure, ProfilingResult

from outrider_operator.cluster_model import Object
from outrider_operator.decide.job_pods import why_failed
from outrider_operator.decide.pod_troubles import has_ended as has_pod_ended
from outrider_operator.decide.pod_troubles import how_it_ended
from outrider_operator.decide.profile_store import FIRST_RETRY_S, Failure, Store
from outrider_operator.decide.profiling.measurement_request import MeasurementRequest
from outrider_operator.validation.invalid_input import InvalidInput
from outrider_operator.validation.reading import (
    created_s,
    cut,
    last_lines,
    text,
    uid_of,
)
from outrider_operator.validation.results import Termination, termination_of

_MESSAGE_LIMIT = 1024
_LAST_LINES = 6


def is_running(pod: Object | None) -> bool:
    return text(pod, "status", "phase") == "Running"


def has_ended(pod: Object | None) -> bool:
    """True if the pod is gone or its status has the container's termination message."""
    return pod is None or termination_of(pod) is not None or text(pod, "status", "phase") == "Failed"


def absorb(store: Store, job: Object, pod: Object | None, request: MeasurementRequest) -> Store:
    """`store` plus the outcome of `job`. Repeating it changes nothing, which shows that the outcome is stored."""
    words = termination_of(pod)
    if words is None or isinstance(words.result, InvalidInput):
        return _all_failed(store, request, _died(job, pod, words))
    return _with_result(store, job, request, words.result)


def _with_result(store: Store, job: Object, request: MeasurementRequest, result: ProfilingResult) -> Store:
    """Add measurements and failures of `result`. A requested key that it does not mention has failed, too."""
    merged = _with_measured(store, request, result)
    merged = _with_reported_failures(merged, job, request, result)
    unanswered = Failure(
        reason="NotMeasured",
        message="The profiling Job reported neither a measurement nor a failure; profiling.timeBudget may be too small",
        job=uid_of(job),
    )
    missing = [key for key in request.measured_keys if key not in _answered(request, result)]
    for key in missing:
        merged = merged.with_failure(key, request.attempt, unanswered)
    return merged.with_request(request.reprofile)


def _with_measured(store: Store, request: MeasurementRequest, result: ProfilingResult) -> Store:
    """Add the requested measurements; others belong to another Job and are dropped."""
    if result.target is not None and request.target and result.target.key == request.keys.target:
        store = store.with_target(result.target)
    for drafter in result.drafters:
        if drafter.key in request.measured_keys:
            store = store.with_drafter(drafter)
    return store


def _with_reported_failures(store: Store, job: Object, request: MeasurementRequest, result: ProfilingResult) -> Store:
    for failure in result.failures:
        for key in _failed_keys(request, failure.drafter):
            if key not in _measured(result):
                store = store.with_failure(key, request.attempt, _reported(failure, job))
    return store


def _reported(failure: ProfilingFailure, job: Object) -> Failure:
    passes = failure.reason == HUB_UNAVAILABLE
    return _failure(job, failure.reason, failure.message, may_pass=passes)


def _failure(job: Object, reason: str, message: str, *, may_pass: bool) -> Failure:
    again_at = created_s(job) + FIRST_RETRY_S if may_pass else 0.0
    return Failure(reason=reason, message=message, job=uid_of(job), tries=int(may_pass), again_at=again_at)


def _failed_keys(request: MeasurementRequest, drafter: str) -> tuple[str, ...]:
    """Keys that a failure concerns: the drafter's key, or all keys if the target failed."""
    if not drafter:
        return request.measured_keys
    return (request.keys.drafters[drafter],) if drafter in request.drafters else ()


def _measured(result: ProfilingResult) -> set[str]:
    return {drafter.key for drafter in result.drafters} | ({result.target.key} if result.target else set())


def _answered(request: MeasurementRequest, result: ProfilingResult) -> set[str]:
    return _measured(result).union(*(_failed_keys(request, failure.drafter) for failure in result.failures))


def _all_failed(store: Store, request: MeasurementRequest, failure: Failure) -> Store:
    for key in request.measured_keys:
        store = store.with_failure(key, request.attempt, failure)
    return store.with_request(request.reprofile)


def _died(job: Object, pod: Object | None, words: Termination | None) -> Failure:
    """A failure described by the profiler's last lines; without any, by how the pod ended, or by the Job controller."""
    said = last_lines(words.message, _LAST_LINES) if words is not None else ""
    if text(pod, "status", "reason") == "DeadlineExceeded":
        what = "It ran longer than profiling.timeout and was stopped"
    elif words is not None and words.exit_code == 0 and isinstance(words.result, InvalidInput):
        what = f"It left no result that can be read ({words.result.detail})"
    elif words is not None:
        what = f"It ended with exit code {words.exit_code} ({words.reason or 'no reason given'})"
    elif pod is not None and has_pod_ended(pod):
        what = how_it_ended(pod)
    else:
        what = why_failed(job) or "Its pod left no result"
    last = f"; its last lines: {said}" if said else ""
    # A container that never ran, or was not made, says nothing of what it should have measured.
    may_pass = (words is None and text(pod, "status", "reason") != "DeadlineExceeded") or (
        words is not None and words.reason == "StartError"
    )
    return _failure(job, "JobFailed", cut(what + last, _MESSAGE_LIMIT), may_pass=may_pass)
