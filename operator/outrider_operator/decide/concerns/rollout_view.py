"""How far the rollout of a revision is, and when time alone changes that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from outrider_crds.base import seconds
from outrider_crds.conditions import ConditionReason
from outrider_crds.rollout_status import RevisionPhase, RevisionStatus

from outrider_operator.cluster_model import LEADER_WORKER_SET, Object
from outrider_operator.decide.concerns.specification_outcome import refused
from outrider_operator.decide.desired.desired_state import DesiredState
from outrider_operator.decide.desired.revisions import Revision, revision_in
from outrider_operator.decide.desired.rollout_gate import is_held
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import Verdict
from outrider_operator.decide.pods.pod_states import Pods, revision_of
from outrider_operator.decide.pods.pod_troubles import unschedulable_since
from outrider_operator.validation.reading import condition_of, integer, items, text, unix_seconds

_INSTALLATION_LOOK_S = 60.0
"""No watch tells when the controller of LeaderWorkerSets is installed, or a foreign Service is gone."""
_UNWATCHED = (ConditionReason.NOT_INSTALLED, ConditionReason.NAME_CONFLICT)
_GROUPS_LOOK_S = 3.0
"""No watch tells what a LeaderWorkerSet reports, and it does so a moment after its pods change."""
_WAS_COMPLETE = (RevisionPhase.COMPLETE, RevisionPhase.PROVEN)


@dataclass(frozen=True)
class RolloutView:
    """A rollout as its conditions see it."""

    world: ServiceWorld
    intent: Intent

    @property
    def desired(self) -> DesiredState:
        return self.intent.desired

    @property
    def workload(self) -> Object | None:
        return self.world.children.workload

    @property
    def pods(self) -> Pods:
        return self.world.pods

    @property
    def is_late(self) -> bool:
        """Is the rollout past its deadline? Where Kubernetes does not check it, its last progress counts."""
        if not self._has_deadline and self.deadline_check_s is None:
            return True
        return condition_of(self.workload or {}, "Progressing").get("reason") == "ProgressDeadlineExceeded"

    @cached_property
    def refused(self) -> Verdict | None:
        """Why the spec must not be applied, or why the API server refuses a child."""
        return refused(self.world.observed, self.intent.problem)

    @cached_property
    def terminating(self) -> Sequence[Object]:
        """Objects that must be gone before a child of the same name can be created."""
        return self.world.children.terminating(self.intent.names)

    def phase(self) -> RevisionPhase:
        """Phase of the revision that should run, for the status and the next decision."""
        revision = self.desired.running
        if revision is None or not self.is_complete(revision):
            return RevisionPhase.ROLLING_OUT
        if not integer(self.workload, "spec", "replicas"):
            return RevisionPhase.NO_PODS
        return RevisionPhase.PROVEN if self.is_proven(revision) else RevisionPhase.COMPLETE

    def is_complete(self, revision: Revision) -> bool:
        """Has the workload observed `revision`, replaced every old pod, and had every new one available at least once?

        This counts as `kubectl rollout status` does. The Deployment's own reason NewReplicaSetAvailable is not used: it
        stays true when an old ReplicaSet is used again.
        """
        workload = self.workload
        if workload is None or revision_in(workload) != revision.name:
            return False
        if integer(workload, "status", "observedGeneration") < integer(workload, "metadata", "generation"):
            return False
        replicas, total = integer(workload, "spec", "replicas"), integer(workload, "status", "replicas")
        new, available = (integer(workload, "status", name) for name in ("updatedReplicas", "availableReplicas"))
        if replicas == 0 or new < total:
            return total == 0
        # Losing a pod later, or scaling, is not a rollout.
        return self._last_phase(revision) in _WAS_COMPLETE or available >= new >= replicas

    def is_proven(self, revision: Revision) -> bool:
        """Has a pod of `revision` had every drafter loaded, now or when its rollout was completed?"""
        return self._last_phase(revision) == RevisionPhase.PROVEN or not self.desired.gate.lacks_proof(revision)

    def _last_phase(self, revision: Revision) -> str:
        """Phase of `revision` in the last status; empty if it reports another revision or none."""
        last = self.world.observed.status.revision or RevisionStatus()
        return last.phase if last.name == revision.name else ""

    def pods_without_node(self, revision: str) -> list[tuple[Object, float]]:
        """Pods of `revision` that the scheduler found no node for, with the Unix time of its first word."""
        pods = [pod for pod in self.pods.with_workers if revision_of(pod) == revision]
        return [(pod, since) for pod in pods if (since := unschedulable_since(pod)) is not None]

    def stuck_pod(self, revision: Revision) -> Object | None:
        """The first pod of `revision` that has waited too long for a node, for which no node is being added."""
        latest = self.pods.at - self.world.settings.no_capacity_after_s
        waiting = (pod for pod, since in self.pods_without_node(revision.name) if since <= latest)
        return next((pod for pod in waiting if self.is_late or not self.pods.node_in_the_making(pod)), None)

    @property
    def is_node_awaited(self) -> bool:
        """True while an autoscaler may still add a node. Its events must be polled: no watch delivers them."""
        deadline_s = seconds(self.desired.spec.rollout.progress_deadline)
        return any(self.pods.at - since < deadline_s for _, since in self.pods_without_node(self._running))

    @property
    def capacity_check_s(self) -> float | None:
        """Seconds until a pod without a node has waited long enough for NoCapacity."""
        limit_s, at = self.world.settings.no_capacity_after_s, self.pods.at
        remaining = [since + limit_s - at for _, since in self.pods_without_node(self._running)]
        return min((wait_s for wait_s in remaining if wait_s > 0), default=None)

    @property
    def deadline_check_s(self) -> float | None:
        """Seconds until a rollout exceeds its deadline, where Kubernetes does not check it."""
        if self._has_deadline:
            return None
        deadline_s = seconds(self.desired.spec.rollout.progress_deadline)
        remaining = self._progressed_at() + deadline_s - self.pods.at
        return remaining if remaining > 0 else None

    @property
    def groups_check_s(self) -> float | None:
        """Seconds until the next look at a LeaderWorkerSet; None if nothing is expected of it."""
        revision, is_wanted = self.desired.running, self.desired.spec.engine.nodes > 1
        if is_wanted and self.refused is not None and self.refused.reason in _UNWATCHED:
            return _INSTALLATION_LOOK_S
        if revision is None or revision.boot.engine.nodes == 1:
            return _GROUPS_LOOK_S if self.workload is not None and self.workload["kind"] == LEADER_WORKER_SET else None
        has_surge = integer(self.workload, "status", "replicas") != integer(self.workload, "spec", "replicas")
        return _GROUPS_LOOK_S if has_surge or not self.is_complete(revision) else None

    @property
    def _running(self) -> str:
        return self.desired.running.name if self.desired.running is not None else ""

    @property
    def _has_deadline(self) -> bool:
        """Does Kubernetes check the rollout's deadline? Not at a closed gate, and not of a LeaderWorkerSet."""
        workload = self.workload
        return workload is None or not (is_held(workload) or workload["kind"] == LEADER_WORKER_SET)

    def _progressed_at(self) -> float:
        """Unix time of the last progress that the workload's controller reported, or of the last group that got
        ready."""
        workload = self.workload or {}
        times = [text(condition_of(workload, "Progressing"), "lastUpdateTime")]
        if workload.get("kind") == LEADER_WORKER_SET:
            new = [pod for pod in self.pods.ready if revision_of(pod) == revision_in(workload)]
            changes = (*items(workload, "status", "conditions"), *(condition_of(pod, "Ready") for pod in new))
            times += [text(change, "lastTransitionTime") for change in changes]
        return max((at for time in times if (at := unix_seconds(time)) is not None), default=self.pods.at)
