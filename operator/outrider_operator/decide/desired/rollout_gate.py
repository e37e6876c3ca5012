"""The gate of a rollout, which stops it after the first new pod until that pod reports every drafter loaded.

At a closed gate the Deployment has minReadySeconds `HOLD_S`, so a new pod never becomes available and the rollout
stops. A LeaderWorkerSet has a partition, below which groups keep their revision. Their controllers enforce this even
while no operator runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from outrider_crds.rollout_settings import OnMissingDrafter
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import GROUPS_LABEL, LEADER_WORKER_SET, REVISION_LABEL, Object
from outrider_operator.decide.desired.revisions import Revision, revision_in
from outrider_operator.decide.ownership import Children
from outrider_operator.decide.pods.pod_states import Pods, revision_of
from outrider_operator.validation.reading import annotation, controller_uid, integer, label, name_of, uid_of

DEADLINE_S = 2**31 - 2
"""progressDeadlineSeconds while the gate is closed: above minReadySeconds, and below 2**31 - 1, which means none."""
HOLD_S = DEADLINE_S - 1
"""minReadySeconds while the gate is closed: 68 years."""
HOLD_ANNOTATION, HOLD = "outrider.dev/held", "true"
"""Annotation of a LeaderWorkerSet whose gate is closed: with one group its partition is 0 then, too."""
SHRUNK_ANNOTATION, SHRUNK = "outrider.dev/scaled-down-while-held", "true"
"""Annotation of a LeaderWorkerSet whose first new group went with a scale-down: the next one comes on top."""
_LEAST_GROWTH = 1.5
"""Growth of a Deployment from which Kubernetes would scale one new pod to two."""


@dataclass(frozen=True)
class Gate:
    continues: bool
    """True if spec.rollout.onMissingDrafter is Continue: the gate is never closed."""
    current: str = ""
    """Revision of the workload's pod template; empty without a workload."""
    in_groups: bool = False
    """Is the workload a LeaderWorkerSet?"""
    is_held: bool = False
    """True while the workload holds its rollout."""
    is_shrunk: bool = False
    """Was a LeaderWorkerSet scaled down while it held its rollout?"""
    replicas: int = 0
    """spec.replicas of the workload."""
    is_settled: bool = True
    """Has the workload's controller observed its latest generation?"""
    serving: frozenset[str] = frozenset()
    """Revisions with a ReplicaSet that is scaled above 0, or with a group."""
    passed: frozenset[str] = frozenset()
    """Revisions in `serving` that no gate holds. A rollback to one needs no check."""
    reports: Mapping[str, Mapping[str, RuntimeState]] = field(default_factory=dict)
    """Revision -> name of a ready pod -> its last report."""

    def is_closed(self, revision: Revision) -> bool:
        """Must a rollout of `revision` stop after its first new pod?

        It need not if no other revision has pods, or if the draft pool is empty.
        """
        if not self.serving - {revision.name}:
            return False
        is_through = not self.is_held if revision.name == self.current else revision.name in self.passed
        return not is_through and self.lacks_proof(revision)

    def of(self, workload: Object | None) -> Gate:
        """The gate of `workload`: while a service changes from one kind to the other, each has its own."""
        return replace(
            self,
            current=revision_in(workload),
            in_groups=workload is not None and workload["kind"] == LEADER_WORKER_SET,
            is_held=is_held(workload),
            is_shrunk=annotation(workload or {}, SHRUNK_ANNOTATION) == SHRUNK,
            replicas=integer(workload, "spec", "replicas"),
            is_settled=_is_settled(workload),
        )

    def shrinks(self, replicas: int) -> bool:
        """Do fewer `replicas` than at the first closing take away the new group of a held rollout?"""
        return self.in_groups and self.is_held and (self.is_shrunk or replicas < self.replicas)

    def lacks_proof(self, revision: Revision) -> bool:
        """True if a pod of `revision` must report every drafter loaded, and none does."""
        return not (self.continues or not revision.boot.draft_pool or self._is_proven(revision))

    def scaled(self, revision: Revision, replicas: int, surge: int) -> int:
        """Replicas to set now on the way to `replicas`: a service grows in steps while its rollout is held.

        Kubernetes scales both revisions in proportion: 1 new pod becomes round(1 * (replicas + surge) / (before +
        surge)). A step below a factor of 1.5 keeps a single new pod. surge: maxSurge of the Deployment.
        """
        is_in_flight = self.is_held and revision.name == self.current and self.is_closed(revision)
        if not is_in_flight or replicas <= self.replicas:
            return replicas
        if not self.is_settled:
            return self.replicas
        step = math.ceil(_LEAST_GROWTH * (self.replicas + surge)) - 1 - surge
        return min(replicas, max(self.replicas, step))

    def missing(self, revision: Revision) -> str:
        """A sentence about a drafter that a ready pod of `revision` has not loaded; empty without one."""
        if self.continues:
            return ""
        pods = sorted(self.reports.get(revision.name, {}).items())
        sentences = (f"Pod {pod}: {why}" for pod, state in pods for why in _not_loaded(revision, state))
        return next(sentences, "")

    def _is_proven(self, revision: Revision) -> bool:
        return any(not _not_loaded(revision, state) for state in self.reports.get(revision.name, {}).values())


def gate_of(
    children: Children,
    replica_sets: Iterable[Object],
    pods: Pods,
    states: Mapping[str, RuntimeState],
    spec: SpeculativeServiceSpec,
) -> Gate:
    mine = [replica_set for replica_set in replica_sets if _is_of(replica_set, children.deployment)]
    kept = [replica_set for replica_set in mine if integer(replica_set, "spec", "replicas") > 0]
    grouped = _revisions_of_groups(children, pods)
    unproven = {revision_in(children.groups)} if is_held(children.groups) else set()
    reports: dict[str, dict[str, RuntimeState]] = {}
    for pod in pods.ready:
        if (state := states.get(name_of(pod))) is not None:
            reports.setdefault(revision_of(pod), {})[name_of(pod)] = state
    gate = Gate(
        continues=spec.rollout.on_missing_drafter is OnMissingDrafter.CONTINUE,
        serving=grouped | {label(replica_set, REVISION_LABEL) for replica_set in kept},
        passed=grouped - unproven
        | {label(replica_set, REVISION_LABEL) for replica_set in kept if not is_held(replica_set)},
        reports=reports,
    )
    return gate.of(children.workload)


def _revisions_of_groups(children: Children, pods: Pods) -> frozenset[str]:
    """Revisions that groups run or are about to run."""
    leaders = {revision_of(pod) for pod in pods.living if label(pod, GROUPS_LABEL)}
    is_scaled = integer(children.groups, "spec", "replicas") > 0
    return frozenset(leaders | ({revision_in(children.groups)} if is_scaled else set()))


def _is_settled(deployment: Object | None) -> bool:
    seen = integer(deployment, "status", "observedGeneration")
    return seen >= integer(deployment, "metadata", "generation")


def is_held(document: Object | None) -> bool:
    """Does a Deployment, ReplicaSet or LeaderWorkerSet hold its pods at the gate?"""
    by_groups = annotation(document or {}, HOLD_ANNOTATION) == HOLD
    return by_groups or integer(document, "spec", "minReadySeconds") == HOLD_S


def _is_of(replica_set: Object, deployment: Object | None) -> bool:
    """Does `replica_set` belong to `deployment`? One without a controller is about to be adopted."""
    return controller_uid(replica_set) in ("", uid_of(deployment or {}))


def _not_loaded(revision: Revision, state: RuntimeState) -> list[str]:
    """Sentences about drafters of `revision` that a pod does not report as loaded."""
    reported = {drafter.name: drafter for drafter in state.drafters}
    sentences = []
    for name in [drafter.name for drafter in revision.boot.draft_pool]:
        drafter = reported.get(name)
        if drafter is None:
            sentences.append(f"it does not report drafter {name}.")
        elif not drafter.loaded:
            sentences.append(
                f"drafter {name} is not loaded: {drafter.reason.rstrip('.') or 'the pod reported no reason'}."
            )
    return sentences
