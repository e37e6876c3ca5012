"""What the status says of groups of pods: whether the cluster can have them, and how many pods a replica has."""

from __future__ import annotations

from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import ConditionReason

from outrider_operator.cluster_model import KUBERNETES_SERVICE, LEADER_WORKER_SET, KindAccess, Observed, groups_name
from outrider_operator.decide.conditions.rollout import RolloutView, is_complete
from outrider_operator.decide.conditions.specification import name_conflict
from outrider_operator.decide.conditions.verdict import Verdict, false
from outrider_operator.decide.ownership import Children, controller_name
from outrider_operator.validation.reading import integer

INSTALLATION_LOOK_S = 60.0
"""No watch tells when the controller of LeaderWorkerSets is installed, or a foreign Service is gone."""
_UNWATCHED = (ConditionReason.NOT_INSTALLED, ConditionReason.NAME_CONFLICT)
_LOOK_S = 3.0
"""No watch tells what a LeaderWorkerSet reports, and it does so a moment after its pods change."""


def no_groups(spec: SpeculativeServiceSpec, access: KindAccess) -> Verdict | None:
    """Why this cluster cannot have groups that the spec asks for; None if it can, or if the spec asks for none."""
    if spec.engine.nodes == 1 or access in (KindAccess.SERVED, KindAccess.UNKNOWN):
        return None
    if access is KindAccess.FORBIDDEN:
        what = "This operator has no right to read LeaderWorkerSets: install the chart of its own release."
        return false(ConditionReason.CHILD_REJECTED, what)
    return false(
        ConditionReason.NOT_INSTALLED,
        "engine.nodes is above 1, and this cluster does not have LeaderWorkerSets (leaderworkerset.x-k8s.io/v1): "
        "install LWS, or set engine.nodes to 1.",
    )


def no_names(spec: SpeculativeServiceSpec, children: Children) -> Verdict | None:
    """A conflict if a Service that is not of the LeaderWorkerSet has its name; LWS takes any for its headless Service.

    No pod would have a DNS name then, so workers would never find their leader.
    """
    key = KUBERNETES_SERVICE, groups_name(children.owner.name)
    document = children.documents.get(key)
    if spec.engine.nodes == 1 or document is None:
        return None
    is_of_groups = controller_name(document) == f"{LEADER_WORKER_SET} {key[1]}"
    return None if is_of_groups else name_conflict(key, document)


def pods_per_replica(observed: Observed, children: Children) -> int | None:
    """Pods of a group; None where a replica is one pod. It is reported until the last group is gone."""
    groups = children.documents.get((LEADER_WORKER_SET, groups_name(children.owner.name)))
    size = integer(groups, "spec", "leaderWorkerTemplate", "size") if children.groups is not None else 0
    nodes = integer(observed.service, "spec", "engine", "nodes")
    return size or (nodes if nodes > 1 else None)


def look_at_groups_s(rollout: RolloutView) -> float | None:
    """Seconds until the next look at a LeaderWorkerSet; None if nothing is expected of it."""
    revision, workload = rollout.desired.running, rollout.deployment
    if rollout.refused is not None and rollout.refused.reason in _UNWATCHED and rollout.desired.spec.engine.nodes > 1:
        return INSTALLATION_LOOK_S
    if revision is None or revision.boot.engine.nodes == 1:
        return _LOOK_S if workload is not None and workload["kind"] == LEADER_WORKER_SET else None
    has_surge = integer(workload, "status", "replicas") != integer(workload, "spec", "replicas")
    return _LOOK_S if has_surge or not is_complete(rollout, revision) else None
