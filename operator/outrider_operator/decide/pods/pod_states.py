"""Read the state of serving pods: ready, waiting for a node, or in trouble, with a sentence about the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice

from outrider_crds.conditions import ConditionReason

from outrider_operator.cluster_model import GROUPS_LABEL, REVISION_LABEL, Object
from outrider_operator.decide.pods.pod_troubles import (
    CRASH_IS_OVER_S,
    PATIENCE_S,
    Trouble,
    crash_of,
    ended_at,
    has_ended,
    how_it_ended,
    scheduler_says,
    trouble_of,
    what_it_waits_for,
    without_made_up_name,
)
from outrider_operator.validation import reading

MOST_TOLERATIONS = 256
"""Tolerations that are read: a spec has 16 and admission adds a few, but users may add hundreds to each pod."""
_UNFINISHED_NODE = ("node.cloudprovider.kubernetes.io/uninitialized", "karpenter.sh/unregistered")
"""Taints of nodes that are joining. The taint `not-ready` is left out, since broken nodes have it as well."""
LOOK_AGAIN_S = 15.0
"""Seconds between looks at what no watch delivers: the events of pods that are being created, a download's progress."""


@dataclass(frozen=True)
class Pods:
    """The serving pods of one service that are not being deleted."""

    living: tuple[Object, ...]
    at: float
    """Unix seconds."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Pod name -> newest Warning event of a pod that has no container yet."""
    forbidden: Trouble | None = None
    """Why the API server refuses new pods of the Deployment."""
    provisioning: Mapping[str, str] = field(default_factory=dict)
    """Pod name -> message of an autoscaler about the node that it adds for the pod."""
    ended: tuple[Object, ...] = ()
    """Pods that ended for good within the last minutes, newest first: evicted, or refused by their node."""
    workers: tuple[Object, ...] = ()
    """Pods of groups other than leaders. A leader is not ready before they have joined it."""
    crashed: tuple[Object, ...] = ()
    """Pods of groups that are being deleted since a container of theirs crashed: each crash makes the whole group
    again, so no pod of a group crashes twice."""

    @property
    def with_workers(self) -> tuple[Object, ...]:
        return (*self.living, *self.workers)

    @cached_property
    def ready(self) -> tuple[Object, ...]:
        return tuple(pod for pod in self.living if is_ready(pod))

    @cached_property
    def tolerations(self) -> tuple[Object, ...]:
        """Tolerations of the pods, including those that admission added. Equal neighbours count once."""
        groups = groupby(reading.items(pod, "spec", "tolerations") for pod in self.living)
        return tuple(islice((toleration for tolerations, _ in groups for toleration in tolerations), MOST_TOLERATIONS))

    def starting(self, within_s: float) -> list[Object]:
        """Pods that have a node, have not passed their start-up probe, and are younger than `within_s`."""
        return [
            pod
            for pod in self.living
            if reading.text(pod, "spec", "nodeName")
            and not any(status.get("started") for status in reading.items(pod, "status", "containerStatuses"))
            and self._trouble_of(pod) is None
            and self.at - reading.created_s(pod) < within_s
        ]

    def trouble(self, revision: str | None = None) -> Trouble | None:
        """Trouble of the first unready pod, of `revision` or of any; else of creating pods; None without any."""
        troubles = (trouble for pod, trouble in self._unready if revision in (None, revision_of(pod)))
        return next(filter(None, troubles), self.forbidden) or self._endings(revision) or self._crash(revision)

    def is_well(self, pod: Object) -> bool:
        """Is the pod ready, and does no container of it end again and again?"""
        return is_ready(pod) and self._trouble_of(pod) is None

    def sickness(self) -> Trouble | None:
        """Trouble of pods of which none is well; None while one is, and while it may still get ready by itself."""
        if any(self.is_well(pod) for pod in self.living):
            return None
        return next(filter(None, map(self._trouble_of, self.living)), None) or self.trouble()

    def why_not_ready(self, revision: str | None = None) -> str:
        """A sentence about pods that are not ready; empty if there is nothing to report."""
        if (trouble := self.trouble(revision)) is not None:
            return trouble.message
        of_it = (pod for pod, _ in self._unready if revision in (None, revision_of(pod)))
        starting = next((self._still_starting(pod) for pod in of_it), "")
        ended = next((how_it_ended(pod) for pod in self.ended if revision in (None, revision_of(pod))), "")
        return ". ".join(sentence for sentence in (starting, ended) if sentence)

    def _crash(self, revision: str | None) -> Trouble | None:
        """Trouble if a group is being made again after a crash."""
        of_it = (pod for pod in self.crashed if revision in (None, revision_of(pod)))
        sentence = next(map(crash_of, of_it), "")
        return Trouble(ConditionReason.POD_CRASHING, f"{sentence}. Its group is made again") if sentence else None

    def _endings(self, revision: str | None) -> Trouble | None:
        """Trouble if a pod and its replacement both ended: the next one will probably end, too."""
        ended = [pod for pod in self.ended if revision in (None, revision_of(pod))]
        again = next((pod for pod in ended if any(_replaces(pod, other) for other in ended if other is not pod)), None)
        return Trouble(ConditionReason.POD_ENDED, how_it_ended(again)) if again is not None else None

    def node_in_the_making(self, pod: Object) -> str:
        """Evidence that a node for `pod` is being added; empty without any."""
        if sentence := self.provisioning.get(reading.name_of(pod)):
            return reading.cut(sentence, 300)
        taint = next((taint for taint in _UNFINISHED_NODE if taint in scheduler_says(pod)), "")
        return f"one has the taint {taint}" if taint else ""

    @cached_property
    def _unready(self) -> list[tuple[Object, Trouble | None]]:
        """Pods that are not ready, with their trouble. It is cached for the conditions: there may be 1,000 pods."""
        return [(pod, self._trouble_of(pod)) for pod in self.with_workers if not is_ready(pod)]

    def _trouble_of(self, pod: Object) -> Trouble | None:
        return trouble_of(pod, self.at, self.warnings.get(reading.name_of(pod), ""))

    def _still_starting(self, pod: Object) -> str:
        return what_it_waits_for(pod, self.warnings.get(reading.name_of(pod), ""), self.node_in_the_making(pod))


def pods_of(
    deployment: Object | None,
    pods: Iterable[Object],
    warnings: Mapping[str, str],
    at: float,
    provisioning: Mapping[str, str] | None = None,
    workers: Iterable[Object] = (),
) -> Pods:
    living = tuple(pod for pod in pods if not reading.is_being_deleted(pod) and not has_ended(pod))
    recently = (pod for pod in pods if has_ended(pod) and at - ended_at(pod) < CRASH_IS_OVER_S)
    ended = sorted((pod for pod in recently if not reading.is_being_deleted(pod)), key=ended_at, reverse=True)
    workers = tuple(workers)
    joining = tuple(pod for pod in workers if not reading.is_being_deleted(pod) and not has_ended(pod))
    grouped = (pod for pod in (*pods, *workers) if reading.label(pod, GROUPS_LABEL) and reading.is_being_deleted(pod))
    crashed = tuple(pod for pod in grouped if crash_of(pod))
    return Pods(living, at, warnings, _forbidden(deployment), provisioning or {}, tuple(ended), joining, crashed)


def is_ready(pod: Object) -> bool:
    return reading.is_true(pod, "Ready")


def revision_of(pod: Object) -> str:
    return reading.label(pod, REVISION_LABEL)


def _replaces(pod: Object, other: Object) -> bool:
    """Was `pod` created after `other` had ended? The kubelet may update the time of the end for a while."""
    return reading.created_s(pod) >= ended_at(other) - PATIENCE_S


def _forbidden(deployment: Object | None) -> Trouble | None:
    """Why the API server refuses new pods of the Deployment: a quota, a policy, a missing priority class."""
    failure = reading.condition_of(deployment or {}, "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    sentence = without_made_up_name(reading.text(failure, "message"))
    return Trouble(ConditionReason.POD_CANNOT_START, f"No pod can be made: {reading.cut(sentence, 500)}")


def why_not_running(job: Object | None, pod: Object | None, warnings: Mapping[str, str], at: float) -> str:
    """A sentence about the pod of `job` that has not begun; empty if there is nothing to report."""
    if pod is None:
        return reading.cut(without_made_up_name(warnings.get(reading.name_of(job or {}), "")), 500)
    return (
        "" if reading.text(pod, "status", "phase") == "Running" else pods_of(None, [pod], warnings, at).why_not_ready()
    )
