"""How a Job's own container ended, whatever containers others added to its pod."""

from __future__ import annotations

from collections.abc import Iterable

from outrider_operator.cluster_model import JOB_NAME_LABEL, Object
from outrider_operator.validation.reading import (
    condition_of,
    created_s,
    ended,
    is_being_deleted,
    is_true,
    items,
    label,
    mapping,
    name_of,
    text,
    uid_of,
)


def pod_of(job: Object, pods: Iterable[Object]) -> Object | None:
    """The Job's newest pod."""
    mine = [pod for pod in pods if label(pod, JOB_NAME_LABEL) == name_of(job)]
    mine = [pod for pod in mine if label(pod, "batch.kubernetes.io/controller-uid") in ("", uid_of(job))]
    return max(mine, key=created_s, default=None)


def is_finished(job: Object) -> bool:
    """Does the Job controller say that it has ended?"""
    return any(is_true(job, kind) for kind in ("Complete", "Failed"))


def is_done(job: Object, pod: Object | None, container: str) -> bool:
    """Has the work of `job` ended? A sidecar that is no native one keeps a pod running, and its Job active, for ever.

    A pod without one ends by itself. A pod that its node or an eviction ends is made again, so its end does not count.
    """
    statuses = items(pod, "status", "containerStatuses")
    is_held = bool(ended(pod, container)) and any("running" in mapping(status, "state") for status in statuses)
    is_ending = pod is not None and (is_being_deleted(pod) or is_true(pod, "DisruptionTarget"))
    return is_finished(job) or (is_held and not is_ending)


def has_succeeded(job: Object, pod: Object | None, container: str) -> bool:
    if is_finished(job):
        return is_true(job, "Complete")
    return is_done(job, pod, container) and ended(pod, container).get("exitCode") == 0


def why_failed(job: Object) -> str:
    """The Job controller's words."""
    return text(condition_of(job, "Failed"), "message")
