"""The gate of a rollout, which stops it after the first new pod until that pod reports every drafter loaded.

At a closed gate the Deployment has minReadySeconds `HOLD_S`, so a new pod never becomes available and the rollout
stops. The Deployment controller enforces this even while no operator runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outrider_crds.runtime_state import RuntimeState
from outrider_crds.spec import OnMissingDrafter, SpeculativeServiceSpec

from outrider_operator.cluster_model import REVISION_LABEL, Object
from outrider_operator.decide.ownership import Children
from outrider_operator.decide.pod_states import Pods, revision_of
from outrider_operator.decide.revisions import Revision, current_revision_name
from outrider_operator.validation.reading import controller_uid, integer, label, name_of, uid_of

DEADLINE_S = 2**31 - 2
"""progressDeadlineSeconds while the gate is closed: above minReadySeconds, and below 2**31 - 1, which means none."""
HOLD_S = DEADLINE_S - 1
"""minReadySeconds while the gate is closed: 68 years."""
_LEAST_GROWTH = 1.5
"""Growth of a Deployment from which Kubernetes would scale one new pod to two."""


@dataclass(frozen=True)
class Gate:
    continues: bool
    """True if spec.rollout.onMissingDrafter is Continue: the gate is never closed."""
    current: str = ""
    """Revision of the Deployment's pod template; empty without a Deployment."""
    is_held: bool = False
    """True while the Deployment holds its rollout."""
    replicas: int = 0
    """spec.replicas of the Deployment."""
    is_settled: bool = True
    """Has the Deployment's controller observed its latest generation?"""
    serving: frozenset[str] = frozenset()
    """Revisions with a ReplicaSet that is scaled above 0."""
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
    reports: dict[str, dict[str, RuntimeState]] = {}
    for pod in pods.ready:
        if (state := states.get(name_of(pod))) is not None:
            reports.setdefault(revision_of(pod), {})[name_of(pod)] = state
    return Gate(
        continues=spec.rollout.on_missing_drafter is OnMissingDrafter.CONTINUE,
        current=current_revision_name(children),
        is_held=is_held(children.deployment),
        replicas=integer(children.deployment, "spec", "replicas"),
        is_settled=_is_settled(children.deployment),
        serving=frozenset(label(replica_set, REVISION_LABEL) for replica_set in kept),
        passed=frozenset(label(replica_set, REVISION_LABEL) for replica_set in kept if not is_held(replica_set)),
        reports=reports,
    )


def _is_settled(deployment: Object | None) -> bool:
    seen = integer(deployment, "status", "observedGeneration")
    return seen >= integer(deployment, "metadata", "generation")


def is_held(document: Object | None) -> bool:
    """Does a Deployment or ReplicaSet hold its pods at the gate?"""
    return integer(document, "spec", "minReadySeconds") == HOLD_S


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
            sentences.append(f"drafter {name} is not loaded: {drafter.reason.rstrip('.') or 'it says no reason'}.")
    return sentences
