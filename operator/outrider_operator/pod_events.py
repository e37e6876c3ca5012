"""Events of pods and Jobs that wait: the only place that tells what delays them, and whether a node is being made."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from outrider_operator.cluster_model import JOB_NAME_LABEL, Object
from outrider_operator.decide.job_pods import is_finished, pod_of
from outrider_operator.decide.pod_troubles import is_being_created
from outrider_operator.kinds import EVENT
from outrider_operator.kubernetes_api import KubernetesApi, some_if_possible
from outrider_operator.validation.reading import (
    condition_of,
    controller_uid,
    created_s,
    dig,
    label,
    name_of,
    text,
    uid_of,
    unix_seconds,
)

_MAX_READS = 4
"""Pods or Jobs whose events are read per reconcile. Conditions name one, and a rollout may have hundreds of pods."""
_NODE_IS_MADE = frozenset({"TriggeredScaleUp", "Nominated"})
"""Reasons of events by which the cluster-autoscaler and Karpenter announce a node."""
_NO_NODE_IS_MADE = frozenset({"NotTriggerScaleUp", "FailedScaleUp", "FailedToScaleUpGroup"})
"""Reasons of events by which the cluster-autoscaler says that it adds no node."""
_KARPENTER = "karpenter"
"""Reporter of Karpenter's events. When it adds no node, its event has the scheduler's reason."""
_LATE_S = 10.0
"""Age from which the events of a pod without a container are read. Most pods have one by then."""

ReadSentence = Callable[[list[Object], Object], str]
"""Finds a sentence in the events of a pod or Job; empty without one."""


async def read_sentences(
    api: KubernetesApi, namespace: str, subjects: Iterable[Object], read: ReadSentence
) -> dict[str, str]:
    """Name -> sentence that `read` finds in the events of `subjects` that have waited for long."""
    sentences: dict[str, str] = {}
    late = [subject for subject in subjects if time.time() - created_s(subject) >= _LATE_S]
    for subject in late[:_MAX_READS]:
        events = await some_if_possible(api, EVENT, namespace, fields=f"involvedObject.uid={uid_of(subject)}")
        if events is None:
            break
        if sentence := read(events, subject):
            sentences[name_of(subject)] = sentence
    return sentences


def current_warning(events: Iterable[Object], subject: Object) -> str:
    """The newest event of `subject` (a pod or Job) if it is a warning; else empty.

    Warnings that no longer apply are ignored: the pod has a node now, or its volume could be mounted after all.
    """
    placed = condition_of(subject, "PodScheduled")
    since_s = unix_seconds(text(placed, "lastTransitionTime")) if placed.get("status") == "True" else None
    current = [event for event in events if since_s is None or not _is_over(event, since_s)]
    newest = max(current, key=lambda event: (_event_s(event), event.get("type") == "Warning"), default={})
    is_warning = newest.get("type") == "Warning"
    return f"{newest.get('reason', '')}: {newest.get('message', '')}" if is_warning else ""


def node_in_the_making(events: Iterable[Object], _pod: Object) -> str:
    """The last event of an autoscaler about `_pod` if it announces a node; else empty."""
    newest = max((event for event in events if _is_of_autoscaler(event)), key=_event_s, default={})
    return f"{newest['reason']}: {newest.get('message', '')}" if newest.get("reason") in _NODE_IS_MADE else ""


def without_container(pods: Iterable[Object], jobs: list[Object], job_pods: Iterable[Object]) -> list[Object]:
    """Pods without a container and Jobs without a pod: only their events tell what delays them."""
    by_job: defaultdict[str, list[Object]] = defaultdict(list)  # an index, since users may create thousands of both
    for pod in job_pods:
        by_job[label(pod, JOB_NAME_LABEL)].append(pod)
    mine = {uid_of(job) for job in jobs}
    created = [*pods, *(pod for pod in job_pods if controller_uid(pod) in mine)]
    podless = [job for job in jobs if not is_finished(job) and pod_of(job, by_job[name_of(job)]) is None]
    return [*(pod for pod in created if is_being_created(pod)), *podless]


def _is_of_autoscaler(event: Object) -> bool:
    reporter = dig(event, "source", "component") or event.get("reportingComponent")
    return event.get("reason") in _NODE_IS_MADE | _NO_NODE_IS_MADE or reporter == _KARPENTER


def _is_over(event: Object, placed_s: float) -> bool:
    return event.get("reason") == "FailedScheduling" or _event_s(event) < placed_s


def _event_s(event: Object) -> float:
    """Unix time of the event's last occurrence in whole seconds, the precision of some clients."""
    times = (dig(event, "series", "lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max((unix_seconds(str(moment)) or 0.0) // 1 for moment in times)
