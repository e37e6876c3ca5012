"""How a Job's own container ended, whatever containers others added to its pod."""

from __future__ import annotations

from collections.abc import Iterable

from outrider_operator.cluster_model import JOB_NAME_LABEL, Object
from outrider_operator.validation import reading


def pods_of_job(job: Object, pods: Iterable[Object]) -> list[Object]:
    """The Job's pods, the newest first."""
    mine = [pod for pod in pods if reading.label(pod, JOB_NAME_LABEL) == reading.name_of(job)]
    mine = [
        pod for pod in mine if reading.label(pod, "batch.kubernetes.io/controller-uid") in ("", reading.uid_of(job))
    ]
    return sorted(mine, key=reading.created_s, reverse=True)


def pod_of(job: Object, pods: Iterable[Object]) -> Object | None:
    """The Job's newest pod."""
    return next(iter(pods_of_job(job, pods)), None)


def is_finished(job: Object) -> bool:
    """Does the Job controller say that it has ended?"""
    return any(reading.is_true(job, kind) for kind in ("Complete", "Failed"))


def is_done(job: Object, pod: Object | None, container: str) -> bool:
    """Has the work of `job` ended? A pod that its node or an eviction ends is made again, so its end does not count."""
    is_ending = pod is not None and (reading.is_being_deleted(pod) or reading.is_true(pod, "DisruptionTarget"))
    return is_finished(job) or (is_held(pod, container) and not is_ending)


def is_held(pod: Object | None, container: str) -> bool:
    """Has the Job's container ended, and do others keep the pod from it? A sidecar that is no native one keeps it
    running, and its Job active, for ever, or makes it fail, and the Job repeat it. A pod without any ends by itself."""
    end, statuses = reading.ended(pod, container), reading.items(pod, "status", "containerStatuses")
    is_kept = any("running" in reading.mapping(status, "state") for status in statuses)
    return bool(end) and (is_kept or (reading.text(pod, "status", "phase") == "Failed" and end.get("exitCode") == 0))


def has_succeeded(job: Object, pods: Iterable[Object], container: str) -> bool:
    return reading.is_true(job, "Complete") or any(reading.ended(pod, container).get("exitCode") == 0 for pod in pods)


def why_failed(job: Object) -> str:
    """The Job controller's words."""
    return reading.text(reading.condition_of(job, "Failed"), "message")
