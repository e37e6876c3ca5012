"""What a finished profiling Job says: a result, a failure in its own words, or nonsense (which is a failure)."""

from __future__ import annotations

from collections.abc import Iterable

from outrider_crds.profile import ProfilingResult

from outrider_operator.decide.profile_store import Failure, Store, failed
from outrider_operator.decide.profiling.asked import Asked
from outrider_operator.inbound.reading import condition_of, cut, is_true, label, name_of, text, uid_of
from outrider_operator.inbound.results import LastWords, last_words
from outrider_operator.inbound.unfit import Unfit
from outrider_operator.model import JOB_NAME_LABEL, Object

_MESSAGE_LIMIT = 1024
_LAST_LINES = 6


def is_finished(job: Object) -> bool:
    return any(is_true(job, kind) for kind in ("Complete", "Failed"))


def pod_of(job: Object, pods: Iterable[Object]) -> Object | None:
    """The Job's newest pod."""
    mine = [pod for pod in pods if label(pod, JOB_NAME_LABEL) == name_of(job)]
    mine = [pod for pod in mine if label(pod, "batch.kubernetes.io/controller-uid") in ("", uid_of(job))]
    return max(mine, key=lambda pod: text(pod, "metadata", "creationTimestamp"), default=None)


def is_running(pod: Object | None) -> bool:
    return text(pod, "status", "phase") == "Running"


def has_ended(pod: Object | None) -> bool:
    """True when the pod is gone or its container's last words are in its status."""
    return pod is None or last_words(pod) is not None or text(pod, "status", "phase") == "Failed"


def absorb(store: Store, job: Object, pod: Object | None, asked: Asked) -> Store:
    """`store` with the outcome of `job`. Doing it twice changes nothing: that is how it is known to be stored."""
    words = last_words(pod)
    if words is None or isinstance(words.result, Unfit):
        return _all_failed(store, asked, _died(job, pod, words))
    return _with_result(store, job, asked, words.result)


def _with_result(store: Store, job: Object, asked: Asked, result: ProfilingResult) -> Store:
    """What was asked for and not answered has failed, too."""
    merged = _with_measured(store, asked, result)
    merged = _with_reported_failures(merged, job, asked, result)
    silent = Failure(
        reason="NotMeasured",
        message="The profiling Job reported neither a measurement nor a failure; profiling.timeBudget may be too small",
        job=uid_of(job),
    )
    missing = [key for key in asked.measured_keys if key not in _answered(asked, result)]
    for key in missing:
        merged = merged.with_failure(key, asked.attempt, silent)
    return merged.with_request(asked.request)


def _with_measured(store: Store, asked: Asked, result: ProfilingResult) -> Store:
    """Measurements of other keys than those asked for are another Job's business and dropped."""
    if result.target is not None and asked.target and result.target.key == asked.keys.target:
        store = store.with_target(result.target)
    for drafter in result.drafters:
        if drafter.key in asked.measured_keys:
            store = store.with_drafter(drafter)
    return store


def _with_reported_failures(store: Store, job: Object, asked: Asked, result: ProfilingResult) -> Store:
    for failure in result.failures:
        for key in _failed_keys(asked, failure.drafter):
            if key not in _measured(result):
                store = store.with_failure(key, asked.attempt, failed(failure, uid_of(job)))
    return store


def _failed_keys(asked: Asked, drafter: str) -> tuple[str, ...]:
    """A drafter's own key; the failure of the target is everyone's."""
    if not drafter:
        return asked.measured_keys
    return (asked.keys.drafters[drafter],) if drafter in asked.drafters else ()


def _measured(result: ProfilingResult) -> set[str]:
    return {drafter.key for drafter in result.drafters} | ({result.target.key} if result.target else set())


def _answered(asked: Asked, result: ProfilingResult) -> set[str]:
    return _measured(result).union(*(_failed_keys(asked, failure.drafter) for failure in result.failures))


def _all_failed(store: Store, asked: Asked, failure: Failure) -> Store:
    for key in asked.measured_keys:
        store = store.with_failure(key, asked.attempt, failure)
    return store.with_request(asked.request)


def _died(job: Object, pod: Object | None, words: LastWords | None) -> Failure:
    """A failure in the pod's own last lines, or in the words of kubelet or Job controller where it left none."""
    lines = [line.strip() for line in words.message.splitlines() if line.strip()] if words is not None else []
    if text(pod, "status", "reason") == "DeadlineExceeded":
        what = "It ran longer than profiling.timeout and was stopped"
    elif words is not None and words.exit_code == 0 and isinstance(words.result, Unfit):
        what = f"It left no result that can be read ({words.result.detail})"
    elif words is not None:
        what = f"It ended with exit code {words.exit_code} ({words.reason or 'no reason given'})"
    else:
        what = text(condition_of(job, "Failed"), "message") or "Its pod left no result"
    last = f"; its last lines: {' | '.join(lines[-_LAST_LINES:])}" if lines else ""
    return Failure(reason="JobFailed", message=cut(what + last, _MESSAGE_LIMIT), job=uid_of(job))
